"""The command line, as a user sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stepbind import cli
from stepbind.hosts.local import compare
from stepbind.models import gated_delta as forward
from stepbind.tiny import save_tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_tiny("qwen3_5", directory)
    return directory


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["stepbind", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(exit.value.code or 0), captured.out, captured.err)

    return call


def test_generate_prints_prompt_and_text(run: Run, checkpoint: Path) -> None:
    result = run("generate", checkpoint, "Hello", "--max-new-tokens", 8)
    assert result.code == 0
    assert result.out.startswith("Hello")
    assert result.err == ""  # quiet: this is no terminal


def test_compare_agrees_and_says_how_far(run: Run, checkpoint: Path) -> None:
    result = run(
        "generate", checkpoint, "Hello", "A longer prompt", "--max-new-tokens", 40, "--compare", "--ignore-eos"
    )
    assert result.code == 0
    assert result.out.count("equal to transformers: 40 of 40 tokens agree") == 2


def test_compare_exits_1_on_a_disagreement(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that reads nothing of its past: the very fault that the comparison is for."""
    real = forward.gated_delta
    monkeypatch.setattr(forward, "gated_delta", lambda *inputs: 0 * real(*inputs))
    result = run("generate", checkpoint, "Hello", "--max-new-tokens", 40, "--compare")
    assert result.code == 1
    assert "DIFFERS from transformers" in result.out


def test_json_has_one_object_a_prompt(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    result = run(
        "generate", checkpoint, "zero", "--prompts-file", prompts, "--max-new-tokens", 5, "--json", "--compare"
    )
    objects = [json.loads(line) for line in result.out.splitlines()]
    assert [each["prompt"] for each in objects] == ["zero", "one", "two"]
    assert all(len(each["tokens"]) == 5 and each["finish_reason"] == "length" for each in objects)
    assert all(each["compare"]["equal"] and each["compare"]["max_logit_difference"] < 1e-3 for each in objects)


def test_a_prompt_that_cannot_be_served_fails_alone(run: Run, checkpoint: Path) -> None:
    result = run("generate", checkpoint, "ok", "x" * 100, "--max-new-tokens", 5, "--cache-tokens", 32, "--json")
    good, bad = (json.loads(line) for line in result.out.splitlines())
    assert result.code == 1
    assert good["finish_reason"] == "length"
    assert "expected at most 33, the context that model and cache allow" in bad["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--temperature", "1", "--compare"], "--temperature: got 1.0, expected 0 with --compare"),
        ([], "prompts: got none, expected at least one PROMPT or a --prompts-file"),
        (["hi", "--dtype", "int3"], "dtype: got 'int3', expected one of auto, float32"),
        (["hi", "--kernel-block-size", "5"], "kernel_block_size: got 5, expected a divisor of block_size 16"),
    ],
)
def test_a_call_that_makes_no_sense_is_one_line_and_exit_2(
    run: Run, checkpoint: Path, arguments: list[str], message: str
) -> None:
    result = run("generate", checkpoint, *arguments)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_checkpoint_that_is_not_there(run: Run, tmp_path: Path) -> None:
    result = run("generate", tmp_path / "nowhere", "hi")
    assert result.code == 2
    assert "where nothing is, expected a directory with a checkpoint" in result.err


def test_models_lists_the_families(run: Run) -> None:
    result = run("models")
    assert result.code == 0
    for name in ("Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE", "Olmo-Hybrid", "Qwen3", "Llama"):
        assert name in result.out


def test_doctor_says_versions_devices_and_kernels(run: Run) -> None:
    result = run("doctor")
    assert result.code == 0
    for word in ("torch", "transformers", "device: cpu", "gated delta rule", "latent attention", "indexer"):
        assert word in result.out


def test_python_m_stepbind_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "stepbind", "--help"], capture_output=True, text=True, check=True)
    assert "generate" in done.stdout


def test_agreement_counts_the_leading_tokens() -> None:
    assert compare.Agreement(3, 3, 0.0).equal
    assert not compare.Agreement(2, 3, 0.5).equal
