"""The checkpoints that come with the package are there, small, and in every wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import stepbind.demo
from stepbind import StepError
from stepbind.demo import shipped

DIRECTORY = Path(stepbind.demo.__file__).parent
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
LARGEST = 12 * 10**6
"""Bytes of all together."""


def files() -> list[Path]:
    return [path for path in (DIRECTORY / "checkpoints").rglob("*") if path.is_file()]


def test_what_is_shipped_is_small() -> None:
    assert 0 < sum(path.stat().st_size for path in files()) <= LARGEST


def test_every_file_of_theirs_is_package_data() -> None:
    patterns = tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]["package-data"]["stepbind.demo"]
    packed = {path for pattern in patterns for path in DIRECTORY.glob(pattern)}
    assert set(files()) == packed


@pytest.mark.parametrize("name", shipped.SHIPPED)
def test_a_checkpoint_is_found_by_its_name(name: str) -> None:
    directory = shipped.shipped_checkpoint(name)
    for part in ("config.json", "model.safetensors", "tokenizer.json", "made.json"):
        assert (directory / part).is_file()


def test_another_name_is_refused() -> None:
    with pytest.raises(StepError, match="checkpoint: got 'huge', expected one of hybrid, sparse-mla"):
        shipped.shipped_checkpoint("huge")


def test_files_that_are_not_there_are_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shipped.resources, "files", lambda package: tmp_path)
    with pytest.raises(StepError, match="checkpoint: got 'hybrid', which is not there, expected its files in"):
        shipped.shipped_checkpoint("hybrid")
