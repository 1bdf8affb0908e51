"""Recall: how many of many fresh questions a checkpoint answers right, by how long ago the telling was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepbind.demo.questions import DISTANCES, Question, draw_question
from stepbind.demo.stories import STOP
from stepbind.hosts.local import Completion, Delta, LocalEngine, SamplingParams

ANSWER_TOKENS = 24
"""New tokens an answer may take. A true one takes fewer (`tests/demo/test_recall.py`)."""

HELD_OUT = 10**9
"""Seeds of fresh questions start here. Training draws its stories from other seeds altogether (text, not numbers)."""


@dataclass(frozen=True)
class Recall:
    """Right answers of so many, at each distance (tokens)."""

    right: dict[int, int]
    asked: dict[int, int]

    @property
    def share(self) -> float:
        return sum(self.right.values()) / sum(self.asked.values())


def draw_questions(
    tokenizer: Callable[..., dict[str, list[int]]], each: int, named: float, seed: int = 0
) -> list[Question]:
    """`each` fresh questions at every distance, of stories as `draw_question` has them; another `seed`, others."""

    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    first = HELD_OUT + seed * 10_000 * len(DISTANCES)
    return [
        draw_question(first + number * len(DISTANCES) + index, distance, named, count)
        for number in range(each)
        for index, distance in enumerate(DISTANCES)
    ]


def answer(
    engine: LocalEngine,
    prompts: Sequence[str],
    *,
    return_logits: bool = False,
    on_token: Callable[[Delta], object] | None = None,
) -> list[Completion]:
    """The engine's greedy answers, one line each. `on_token` gets every token with its text as it comes."""
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, stop=(STOP,), return_logits=return_logits)
    return engine.generate(list(prompts), sampling, on_token=on_token)


def recall_of(questions: Sequence[Question], answers: Sequence[Completion]) -> Recall:
    """How many of the questions these completions answer, at each of the DISTANCES they were drawn for."""
    right, asked = dict.fromkeys(DISTANCES, 0), dict.fromkeys(DISTANCES, 0)
    for question, completion in zip(questions, answers, strict=True):
        asked[question.wanted] += 1
        right[question.wanted] += question.right(completion.text)
    return Recall(right, asked)
