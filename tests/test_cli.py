"""The command line, as a user sees it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stepbind import cli
from stepbind.demo.questions import Question
from stepbind.demo.recall import draw_questions
from stepbind.hosts.local import compare
from stepbind.models import gated_delta as forward
from stepbind.tiny import save_tiny
from tests.demo import made


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
        ([], "expected at least one PROMPT or a --prompts-file"),
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


@pytest.mark.parametrize(
    ("given", "checkpoint", "prompts"),
    [
        ([], "hybrid", []),
        (["Once upon a time."], "hybrid", ["Once upon a time."]),
        (["Two words", "and", "more"], "hybrid", ["Two words", "and", "more"]),
        (["hybrid", "Once"], "hybrid", ["Once"]),
        (["gpt2"], "gpt2", []),
        (["owner/name", "Two words"], "owner/name", ["Two words"]),
        (["./no such place", "Two words"], "./no such place", ["Two words"]),
        (["~/no such place"], "~/no such place", []),
        (["x " * 5000], "hybrid", ["x " * 5000]),
    ],
)
def test_the_first_argument_is_the_checkpoint_where_it_can_be_one(
    given: list[str], checkpoint: str, prompts: list[str]
) -> None:
    assert cli.checkpoint_and_prompts(given) == (checkpoint, prompts)


def test_a_directory_with_a_space_in_its_name_is_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.checkpoint_and_prompts(["my model", "hi"]) == ("my model", ["hi"])


def test_generate_without_a_checkpoint_takes_the_hybrid_one(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "shipped_checkpoint", {"hybrid": checkpoint}.__getitem__)
    with_it = run("generate", checkpoint, "Hello you", "--max-new-tokens", 8)
    assert run("generate", "Hello you", "--max-new-tokens", 8).out == with_it.out
    assert run("generate", "hybrid", "Hello you", "--max-new-tokens", 8).out == with_it.out
    (tmp_path / "prompts.txt").write_text("Hello you\n")
    assert run("generate", "--prompts-file", "prompts.txt", "--max-new-tokens", 8).out == with_it.out


def test_one_word_alone_is_a_checkpoint_without_prompts(run: Run) -> None:
    result = run("generate", "Hello")
    assert result.code == 2
    assert "prompts: got none behind the CHECKPOINT 'Hello', expected at least one PROMPT" in result.err


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


@pytest.fixture(scope="module")
def reads_stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.save(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def short_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long ones in the table: they take their time."""

    def drawn(*arguments: object) -> list[Question]:
        return [question for question in draw_questions(*arguments) if question.wanted <= 64]  # type: ignore[arg-type]

    monkeypatch.setattr(cli, "draw_questions", drawn)


@pytest.mark.usefixtures("short_questions")
def test_demo_tells_asks_and_counts(run: Run, reads_stories: Path) -> None:
    result = run("demo", "--checkpoint", reads_stories, "--questions", 2)
    assert result.code == 0
    assert result.err == ""
    assert "FAULT" not in result.out
    assert "Once upon a time." in result.out
    assert len(re.findall(r"^Q: ", result.out, re.MULTILINE)) == 4
    for column in ("as one chunk", "in chunks of 100", "after a prefix hit"):
        assert column in result.out
    assert result.out.count("(0/6)") == 3
    assert result.out == run("demo", "--checkpoint", reads_stories, "--questions", 2).out


@pytest.mark.usefixtures("short_questions")
def test_demo_says_first_which_fault_is_switched_on(run: Run, reads_stories: Path) -> None:
    result = run("demo", "--break", "state", "--checkpoint", reads_stories, "--questions", 1)
    assert result.code == 0
    assert result.out.startswith("FAULT SWITCHED ON: state.")
    assert "Recall with the fault 'state'" in result.out
    assert result.out.count("(0/3)") == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--break", "nothing"], "fault: got 'nothing', expected one of state, slot, padding"),
        (["nobody"], "stories: got 'nobody', expected one of hybrid, sparse-mla"),
    ],
)
def test_a_demo_of_something_unknown_is_one_line_and_exit_2(
    run: Run, reads_stories: Path, arguments: list[str], message: str
) -> None:
    result = run("demo", *arguments, "--checkpoint", reads_stories)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


def test_python_m_stepbind_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "stepbind", "--help"], capture_output=True, text=True, check=True)
    assert "generate" in done.stdout


def test_agreement_counts_the_leading_tokens() -> None:
    assert compare.Agreement(3, 3, 0.0).equal
    assert not compare.Agreement(2, 3, 0.5).equal
