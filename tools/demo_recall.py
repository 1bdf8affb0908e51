"""Recall of a demonstration checkpoint on fresh questions, through stepbind on the CPU, as a Markdown table.

    python tools/demo_recall.py hybrid --each 125 --against-transformers
    python tools/demo_recall.py hybrid --each 25 --break state
    python tools/demo_recall.py DIRECTORY --stories sparse-mla

Everything is in float32. `--against-transformers` gives the same questions to transformers' own `generate`, one by
one, and counts the answers that are equal token for token. Each process has one thread and one batch of questions of
one distance at a time: layers of this size are too small to share.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers
from rich.progress import track
from transformers.utils import logging

from stepbind.demo.faults import FAULTS
from stepbind.demo.questions import DISTANCES, Question
from stepbind.demo.recall import ANSWER_TOKENS, answer, draw_questions
from stepbind.demo.shipped import SHIPPED, shipped_checkpoint
from stepbind.demo.stories import KINDS, NAMED
from stepbind.demo.ways import Subject, in_batches, load
from stepbind.hosts.local import EngineOptions
from stepbind.hosts.local.compare import compare

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
"""For the processes: glibc keeps what is freed. The scores of a long prompt take hundreds of megabytes a layer in
transformers, and to have them mapped afresh each time took 40% of its time on 2,000 tokens."""


@dataclass(frozen=True)
class Settings:
    """What every process needs to know. rows: questions at one time. chunk: prompt tokens of a pass."""

    checkpoint: Path
    fault: str | None
    block_size: int
    rows: int
    chunk: int
    against_transformers: bool


@dataclass(frozen=True)
class Outcome:
    """One question answered. equal: token for token what transformers generates, where it was asked."""

    wanted: int
    kind: str
    right: bool
    equal: bool


@cache
def subject_of(settings: Settings) -> Subject:
    """Loaded once in each process."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return load(settings.checkpoint, fault=settings.fault)


def ask(settings: Settings, questions: Sequence[Question]) -> list[Outcome]:
    """Answer one batch, then again with the plain model where that is wanted."""
    subject = subject_of(settings)
    prompts = [question.prompt for question in questions]
    # Padding spoils one row that lives, so every question is that row, and one row pads it.
    rows = 2 if subject.padded else settings.rows
    room = sum(subject.count(prompt) + ANSWER_TOKENS + settings.block_size for prompt in prompts)
    options = EngineOptions(
        block_size=settings.block_size,
        token_budget=settings.chunk,
        max_rows=rows,
        cache_tokens=room,
        graphs=subject.padded,
        graph_rows=(rows,),
    )
    with subject.spoiled(), subject.engine(options) as engine:
        size = 1 if subject.padded else len(prompts)
        parts = [prompts[at : at + size] for at in range(0, len(prompts), size)]
        found = [each for part in parts for each in answer(engine, part, return_logits=settings.against_transformers)]
    equal = [True] * len(found)
    if settings.against_transformers:
        equal = [agreement.equal for agreement in compare(subject.model, found)]
    return [
        Outcome(question.wanted, question.asked.kind, question.right(each.text), same)
        for question, each, same in zip(questions, found, equal, strict=True)
    ]


def table(outcomes: Sequence[Outcome], against_transformers: bool) -> str:
    """Markdown: right and equal answers by distance, by kind, and of all."""
    head = ["", "asked", "right", "recall", *(["equal to transformers"] if against_transformers else [])]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]

    def add(name: str, belongs: Callable[[Outcome], bool]) -> None:
        some = [outcome for outcome in outcomes if belongs(outcome)]
        right, equal = sum(each.right for each in some), sum(each.equal for each in some)
        cells = [name, str(len(some)), str(right), f"{100 * right / len(some):.1f}%" if some else "-"]
        lines.append("| " + " | ".join(cells + [str(equal)] * against_transformers) + " |")

    for distance in DISTANCES:
        add(f"{distance} tokens", lambda each, distance=distance: each.wanted == distance)  # type: ignore[misc]
    for kind in KINDS:
        add(kind, lambda each, kind=kind: each.kind == kind)  # type: ignore[misc]
    add("all", lambda each: True)
    return "\n".join(lines)


def answered(settings: Settings, questions: Sequence[Question], processes: int) -> Iterable[Outcome]:
    """Batches on so many processes, the longest questions first."""
    batches = in_batches(questions, settings.rows)[::-1]
    os.environ.update(KEEP_MEMORY)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(ask, settings, batch) for batch in batches]
        for done in track(as_completed(running), "Asking", total=len(running)):
            yield from done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help=f"{' or '.join(SHIPPED)}, or a directory")
    parser.add_argument("--stories", choices=list(NAMED), help="Whose stories are told; needed for a directory.")
    parser.add_argument("--each", type=int, default=125, help="Questions at each distance.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--break", dest="fault", choices=list(FAULTS))
    parser.add_argument("--against-transformers", action="store_true")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help="Questions at one time, in each process.")
    parser.add_argument("--chunk", type=int, default=500, help="Prompt tokens of a pass.")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    stories = given.stories or given.checkpoint
    if stories not in NAMED:
        parser.error("a directory needs --stories")
    started = time.perf_counter()
    place = shipped_checkpoint(given.checkpoint) if given.checkpoint in SHIPPED else Path(given.checkpoint)
    settings = Settings(
        place, given.fault, given.block_size, given.rows, given.chunk, against_transformers=given.against_transformers
    )
    questions = draw_questions(subject_of(settings).tokenizer, given.each, NAMED[stories], given.seed)
    outcomes = list(answered(settings, questions, given.processes))
    fault = f"fault {given.fault!r} switched on, " if given.fault else ""
    print(
        f"{given.checkpoint}: {fault}seed {given.seed}, blocks of {given.block_size} tokens, passes of at most "
        f"{given.chunk}, {given.rows} rows; {time.perf_counter() - started:.0f} s in {given.processes} processes on "
        f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}\n"
    )
    print(table(outcomes, given.against_transformers))


if __name__ == "__main__":
    main()
