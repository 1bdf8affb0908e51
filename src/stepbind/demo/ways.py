"""The ways in which an engine can come to an answer, and the recall of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from stepbind.caches import StateSpec
from stepbind.demo.faults import FAULTS, broken
from stepbind.demo.questions import DISTANCES, Question
from stepbind.demo.recall import ANSWER_TOKENS, Recall, answer, recall_of
from stepbind.errors import StepError
from stepbind.hosts.local import Completion, EngineOptions, LocalEngine
from stepbind.hosts.local.engine import load_tokenizer
from stepbind.layers import discover_layers

BLOCK_SIZE = 16
CHUNK = 100
"""Prompt tokens of a pass where prompts are cut: no multiple of the block size, so passes end anywhere in a block."""
AT_ONCE = 16
"""Questions in flight."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A loaded checkpoint, and the fault that its engines have, if any.

    In float32: rounding then decides nothing, and every way has to come to the same answers.
    """

    model: Any
    tokenizer: Any
    fault: str | None = None

    @property
    def on_gpu(self) -> bool:
        return bool(self.model.device.type == "cuda")

    @property
    def padded(self) -> bool:
        """Whether rows that pad a graph are part of the show, on the CPU in passes as a graph would run them."""
        return self.fault == "padding"

    @property
    def at_once(self) -> int:
        """Padding spoils one row that lives: every question has to be that row once."""
        return 1 if self.padded else AT_ONCE

    def spoiled(self) -> AbstractContextManager[None]:
        """Inside the block, the fault is switched on."""
        return broken(self.fault) if self.fault else nullcontext()

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer(text)["input_ids"])

    def engine(self, options: EngineOptions) -> LocalEngine:
        """One on this model, which has one at a time."""
        return LocalEngine(self.model, self.tokenizer, options)

    def options(self, prompt_tokens: int, *, chunk: int | None = None, reuse: bool = False) -> EngineOptions:
        """For so many tokens of prompts in flight, in passes of `chunk` tokens; None: all in one pass.

        reuse: keep the state of every block and look for prefixes, with room for twice as much.
        """
        rows = 2 if self.padded else self.at_once
        tokens = prompt_tokens + self.at_once * (ANSWER_TOKENS + BLOCK_SIZE)
        return EngineOptions(
            block_size=BLOCK_SIZE,
            token_budget=chunk or prompt_tokens,
            max_rows=rows,
            cache_tokens=2 * tokens if reuse else tokens,
            keep_state_every=1 if reuse else 0,
            reuse_prefixes=reuse,
            graphs=self.padded,
            graph_rows=(rows,),
        )


def load(checkpoint: str | Path, *, fault: str | None = None, device: str = "cpu") -> Subject:
    """Load a checkpoint with its tokenizer.

    Raises `StepError` for a fault or a device that is not known, and for a fault that this model cannot show there.
    """
    if fault is not None and fault not in FAULTS:
        raise StepError("fault", repr(fault), f"one of {', '.join(FAULTS)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise StepError("device", repr(device), "cpu: torch sees no GPU")
    if fault == "padding" and torch.device(device).type != "cpu":
        raise StepError("fault", f"'padding' on {device}", "the CPU: captured graphs hold the plan as it was")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device).eval()
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise StepError("checkpoint", f"{str(checkpoint)!r} without a tokenizer", "one that reads text")
    if fault == "state" and not any(isinstance(layer.spec, StateSpec) for layer in discover_layers(model)):
        raise StepError("fault", "'state' with a model that has no recurrent state", "'slot' or 'padding'")
    return Subject(model, tokenizer, fault)


@dataclass(frozen=True)
class Column:
    """One way to the answers, and how many of them were right."""

    way: str
    recall: Recall
    completions: tuple[Completion, ...]


WHOLE, CUT, HIT, GRAPHS = "as one chunk", f"in chunks of {CHUNK}", "after a prefix hit", "by graphs"
WITHOUT = f"{CUT}, without the fault"

Came = Callable[[int], object]
"""Called whenever answers have come, with how many."""


def columns(subject: Subject, questions: Sequence[Question], came: Came = lambda count: None) -> Iterator[Column]:
    """The recall of every way, as each is done: with the fault where there is one, and in chunks without it.

    Completions are in the order of `in_batches`.
    """
    questions = [question for batch in in_batches(questions, AT_ONCE) for question in batch]
    with subject.spoiled():
        first, again = _asked_twice(subject, questions, came)
        yield _column(WHOLE, questions, first)
        yield _column(CUT, questions, _asked(subject, questions, came, chunk=CHUNK))
        yield _column(HIT, questions, again)
    if subject.fault is not None:
        yield _column(WITHOUT, questions, _asked(subject, questions, came, chunk=CHUNK))
    elif subject.on_gpu:
        yield _column(GRAPHS, questions, _asked(subject, questions, came, graphs=True))


def ways(subject: Subject) -> int:
    """How many `columns` there are."""
    return 4 if subject.fault is not None or subject.on_gpu else 3


def _asked(
    subject: Subject, questions: Sequence[Question], came: Came, *, chunk: int | None = None, graphs: bool = False
) -> list[Completion]:
    batches = in_batches(questions, subject.at_once)
    options = subject.options(_most_tokens(subject, batches), chunk=chunk)
    found: list[Completion] = []
    with subject.engine(replace(options, graphs=graphs or options.graphs)) as engine:
        for batch in batches:
            found += answer(engine, [each.prompt for each in batch])
            came(len(batch))
    return found


def _asked_twice(
    subject: Subject, questions: Sequence[Question], came: Came
) -> tuple[list[Completion], list[Completion]]:
    """Each question once as one chunk, and once more while the cache holds all its full blocks."""
    batches = in_batches(questions, subject.at_once)
    first: list[Completion] = []
    again: list[Completion] = []
    with subject.engine(subject.options(_most_tokens(subject, batches), reuse=True)) as engine:
        for batch in batches:
            for found in (first, again):
                found += answer(engine, [each.prompt for each in batch])
                came(len(batch))
            engine.forget_prefixes()
    return first, again


def in_batches(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """At most `size` questions of one distance each, shortest first: on the CPU a pass pads its rows to the longest."""
    batches = []
    for distance in DISTANCES:
        alike = [question for question in questions if question.wanted == distance]
        batches += [alike[at : at + size] for at in range(0, len(alike), size)]
    return batches


def _most_tokens(subject: Subject, batches: list[list[Question]]) -> int:
    """Prompt tokens of the largest batch."""
    return max(sum(subject.count(question.prompt) for question in batch) for batch in batches)


def _column(way: str, questions: Sequence[Question], completions: Sequence[Completion]) -> Column:
    return Column(way, recall_of(questions, completions), tuple(completions))
