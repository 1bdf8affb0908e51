"""Every way to the answers is what its column says, and a fault is in its own columns alone."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from stepbind import StepError
from stepbind.demo.questions import Question
from stepbind.demo.recall import ANSWER_TOKENS, draw_questions, recall_of
from stepbind.demo.ways import (
    AT_ONCE,
    BLOCK_SIZE,
    CHUNK,
    CUT,
    HIT,
    WHOLE,
    WITHOUT,
    Column,
    Subject,
    columns,
    in_batches,
    load,
    ways,
)
from tests.demo import made


@functools.cache
def questions() -> tuple[Question, ...]:
    drawn = draw_questions(made.tokenizer(), 2, 0.4)
    return tuple(question for question in drawn if question.wanted <= 256)


@functools.cache
def asked(fault: str | None, family: str = "qwen3_5") -> dict[str, Column]:
    subject = Subject(made.model(family), made.tokenizer(), fault)
    counted: list[int] = []
    found = list(columns(subject, questions(), counted.append))
    assert sum(counted) == ways(subject) * len(questions())
    assert len(found) == ways(subject)
    return {column.way: column for column in found}


def tokens(column: Column) -> list[list[int]]:
    return [completion.tokens for completion in column.completions]


def test_prompts_are_whole_or_cut_or_found_in_the_cache() -> None:
    found = asked(None)
    assert list(found) == [WHOLE, CUT, HIT]
    for completion in found[WHOLE].completions:
        assert (completion.reused, completion.chunks) == (0, (len(completion.prompt),))
    for completion in found[CUT].completions:
        assert completion.reused == 0
        assert max(completion.chunks) <= CHUNK
        assert len(completion.chunks) >= len(completion.prompt) / CHUNK
    for completion in found[HIT].completions:
        assert completion.reused == (len(completion.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("family", ["qwen3_5", "glm_moe_dsa"])
def test_every_way_comes_to_the_same_answers(family: str) -> None:
    found = asked(None, family)
    assert tokens(found[WHOLE]) == tokens(found[CUT]) == tokens(found[HIT])


def test_a_column_is_the_recall_of_its_answers() -> None:
    drawn = [question for batch in in_batches(questions(), AT_ONCE) for question in batch]
    for column in asked(None).values():
        assert column.recall == recall_of(drawn, column.completions)
        prompts = [made.tokenizer()(question.prompt)["input_ids"] for question in drawn]
        assert [completion.prompt for completion in column.completions] == prompts


@pytest.mark.parametrize("fault", ["state", "slot", "padding"])
def test_a_fault_is_in_every_column_but_the_one_without(fault: str) -> None:
    broken, right = asked(fault), asked(None)
    assert list(broken) == [WHOLE, CUT, HIT, WITHOUT]
    assert tokens(broken[WITHOUT]) == tokens(right[CUT])
    for way in (WHOLE, CUT, HIT):
        assert tokens(broken[way]) != tokens(right[way])


def test_batches_are_of_one_distance_and_leave_no_question_out() -> None:
    batches = in_batches(questions(), 1)
    assert all(len(batch) == 1 for batch in batches)
    assert sorted(question.prompt for [question] in batches) == sorted(question.prompt for question in questions())
    for batch in in_batches(questions(), AT_ONCE):
        assert len({question.wanted for question in batch}) == 1


@pytest.fixture(scope="module")
def attention_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.save(tmp_path_factory.mktemp("checkpoint"), "qwen3")


def test_a_checkpoint_is_loaded_in_float32_with_its_tokenizer(attention_only: Path) -> None:
    subject = load(attention_only, fault="slot")
    assert subject.model.dtype == torch.float32
    assert subject.count("Once upon a time.") < ANSWER_TOKENS
    assert subject.fault == "slot"


@pytest.mark.parametrize(
    ("fault", "device", "message"),
    [
        ("nothing", "cpu", "fault: got 'nothing', expected one of state, slot, padding"),
        ("state", "cpu", "fault: got 'state' with a model that has no recurrent state, expected 'slot' or 'padding'"),
        ("padding", "meta", "fault: got 'padding' on meta, expected the CPU"),
    ],
)
def test_a_fault_that_cannot_be_shown_is_refused(attention_only: Path, fault: str, device: str, message: str) -> None:
    with pytest.raises(StepError, match=message):
        load(attention_only, fault=fault, device=device)
