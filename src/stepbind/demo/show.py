"""What `stepbind demo` prints: a story with its cache blocks, questions with their answers, and a recall table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepbind.demo.faults import FAULTS
from stepbind.demo.questions import DISTANCES, Question, draw_conversation
from stepbind.demo.recall import answer
from stepbind.demo.ways import BLOCK_SIZE, CHUNK, Column, Subject
from stepbind.hosts.local import Completion, Delta

STORY_DISTANCE = 256
"""Tokens between the telling and the first question of the story that is shown."""
ASKED = 4
"""Questions about it."""
EDGE = 8
"""Tokens shown of a reused beginning, at each of its ends."""

BLOCK_MARK, REUSED_MARKS, LEFT_OUT = "|", ("[", "]"), " ..."


def converse(console: Console, subject: Subject, named: float, seed: int) -> None:
    """Tell a story and ask about it, every answer as it streams. What a question shares with those before it is found
    in the cache, and shown as the engine reports it."""
    questions = draw_conversation(seed, STORY_DISTANCE, named, subject.count)[:ASKED]
    story = questions[0].prompt.removesuffix(questions[0].asked.prompt)
    told = subject.count(story)
    room = ASKED * max(subject.count(question.prompt) for question in questions)
    options = subject.options(room, chunk=CHUNK, reuse=True)
    legend = Text.assemble(
        (BLOCK_MARK, "cyan"), f" a cache block of {BLOCK_SIZE} tokens begins   ",
        reused_text("..."), " found in the cache, not computed again\n",
    )  # fmt: skip
    console.print(legend)
    console.print(marked(subject.tokenizer, tokens_of(subject, story)), soft_wrap=False)
    with subject.spoiled(), subject.engine(options) as engine:
        for question in questions:
            prompt = tokens_of(subject, question.prompt)
            console.print(marked(subject.tokenizer, prompt, told), end="")
            [found] = answer(engine, [question.prompt], on_token=_streamed(console, len(prompt)))
            console.print()
            console.print(verdict(question, found), soft_wrap=False)
            if found.reused:
                console.print(Text("  ") + reused_prompt(subject.tokenizer, found))


def _streamed(console: Console, prompt_len: int) -> Callable[[Delta], None]:
    """Prints each token's text behind a mark where it begins a block."""
    position = prompt_len

    def on_token(delta: Delta) -> None:
        nonlocal position
        text = Text(printable(delta.text), "bold")
        console.print(_mark() + text if position % BLOCK_SIZE == 0 and delta.text else text, end="")
        position += 1

    return on_token


def tokens_of(subject: Subject, text: str) -> list[int]:
    found: list[int] = subject.tokenizer(text)["input_ids"]
    return found


def marked(tokenizer: Any, tokens: Sequence[int], start: int = 0, end: int | None = None) -> Text:
    """The text of `tokens[start:end]`, with a mark wherever one of them is the first of a cache block."""
    end = len(tokens) if end is None else end
    text = Text()
    while start < end:
        if start % BLOCK_SIZE == 0:
            text += _mark()
        behind = min(end, (start // BLOCK_SIZE + 1) * BLOCK_SIZE)
        text.append(printable(tokenizer.decode(tokens[start:behind])))
        start = behind
    return text


def reused_prompt(tokenizer: Any, found: Completion) -> Text:
    """A prompt on one line: between the marks, the ends of what was found in the cache; then the rest of it."""
    prompt, reused = found.prompt, found.reused
    if reused <= 2 * EDGE:
        within = marked(tokenizer, prompt, 0, reused)
    else:
        within = marked(tokenizer, prompt, 0, EDGE) + Text(LEFT_OUT) + marked(tokenizer, prompt, reused - EDGE, reused)
    lines = (reused_text(within) + marked(tokenizer, prompt, reused)).split("\n")
    return Text(" ").join(lines)


def reused_text(text: str | Text) -> Text:
    """Text between the marks of what was found in the cache."""
    whole = Text.assemble(REUSED_MARKS[0], text, REUSED_MARKS[1])
    whole.stylize("green")
    return whole


def verdict(question: Question, found: Completion) -> Text:
    """Whether the answer is right, and what it took."""
    right = Text("right", "green") if question.right(found.text) else Text("wrong", "bold red")
    so = f" ({question.asked.value}, told {question.distance} tokens before): "
    chunks = ", ".join(map(str, found.chunks))
    return Text("  ") + right + Text(f"{so}reused {found.reused} of {len(found.prompt)} tokens, computed {chunks}")


def fault_line(fault: str) -> Text:
    """Which fault is switched on, and what it is."""
    what = " ".join((FAULTS[fault].__doc__ or "").split())
    shim = "A shim for tests (stepbind.demo.faults) does this to the plans of this demo, and to nothing else."
    return Text.assemble((f"FAULT SWITCHED ON: {fault}. ", "bold red"), f"{what} {shim}")


def recall_table(columns: Sequence[Column], fault: str | None) -> Table:
    """Right answers by distance (rows) and way (columns), with a total."""
    table = Table("tokens ago", title="Recall" + (f" with the fault {fault!r}" if fault else ""))
    for column in columns:
        table.add_column(column.way, justify="right")
    for distance in DISTANCES:
        counts = [(column.recall.right[distance], column.recall.asked[distance]) for column in columns]
        table.add_row(str(distance), *(share(*each) for each in counts))
    table.add_section()
    totals = [(sum(column.recall.right.values()), sum(column.recall.asked.values())) for column in columns]
    table.add_row("all", *(share(*each) for each in totals))
    return table


def share(right: int, asked: int) -> str:
    """As in "50% (2/4)"; rounded down, so that only all is 100%."""
    return f"{100 * right // asked}% ({right}/{asked})" if asked else "-"


def printable(text: str) -> str:
    """Text without what would move the cursor."""
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)


def _mark() -> Text:
    return Text(BLOCK_MARK, "cyan")
