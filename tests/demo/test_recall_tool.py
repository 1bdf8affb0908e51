"""The recall script counts what was answered, and what transformers answers the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stepbind.demo.questions import DISTANCES
from stepbind.demo.recall import draw_questions
from tests.demo import made

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import demo_recall


def settings(checkpoint: Path, fault: str | None = None) -> demo_recall.Settings:
    return demo_recall.Settings(checkpoint, fault, block_size=16, rows=4, chunk=50, against_transformers=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.save(tmp_path_factory.mktemp("checkpoint"))


def test_answers_equal_transformers_own_without_a_fault_alone(checkpoint: Path) -> None:
    questions = [each for each in draw_questions(made.tokenizer(), 2, 0.4) if each.wanted == 64]
    right = demo_recall.ask(settings(checkpoint), questions)
    assert [(each.wanted, each.kind) for each in right] == [(64, question.asked.kind) for question in questions]
    assert all(each.equal for each in right)
    assert not all(each.equal for each in demo_recall.ask(settings(checkpoint, "state"), questions))
    assert not all(each.equal for each in demo_recall.ask(settings(checkpoint, "padding"), questions))


def test_the_table_has_every_distance_and_kind_and_the_total() -> None:
    outcomes = [
        demo_recall.Outcome(distance, kind, right, equal)
        for distance, kind, right, equal in (
            (16, "town", True, True),
            (16, "code", True, False),
            (2000, "code", False, True),
        )
    ]
    lines = demo_recall.table(outcomes, against_transformers=True).splitlines()
    assert lines[2] == "| 16 tokens | 2 | 2 | 100.0% | 1 |"
    assert lines[1 + len(DISTANCES)] == "| 2000 tokens | 1 | 0 | 0.0% | 1 |"
    assert "| code | 2 | 1 | 50.0% | 1 |" in lines
    assert lines[-1] == "| all | 3 | 2 | 66.7% | 2 |"
    assert "transformers" not in demo_recall.table(outcomes, against_transformers=False)
