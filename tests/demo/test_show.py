"""What `stepbind demo` prints of blocks, prefix hits and recall is what they are."""

from __future__ import annotations

import io
import re

from rich.console import Console

from stepbind import Completion
from stepbind.demo import show
from stepbind.demo.questions import DISTANCES, draw_conversation
from stepbind.demo.recall import Recall, draw_questions, recall_of
from stepbind.demo.ways import BLOCK_SIZE, Column, Subject
from stepbind.hosts.local import Delta
from tests.demo import made

TEXT = draw_questions(made.tokenizer(), 1, 0.4)[4].prompt
TOKENS = made.tokenizer()(TEXT)["input_ids"]


def printed(width: int = 100_000) -> tuple[Console, io.StringIO]:
    """A console that is no terminal, and what comes out of it."""
    out = io.StringIO()
    return Console(file=out, width=width, highlight=False, soft_wrap=True), out


def blocks(first: int, end: int) -> list[str]:
    """The text of TOKENS[first:end], taken apart where blocks begin, token by token."""
    parts = [""]
    for index in range(first, end):
        if index % BLOCK_SIZE == 0:
            parts.append("")
        parts[-1] += made.tokenizer().decode([TOKENS[index]])
    return parts


def test_a_mark_stands_where_a_block_begins_and_nowhere_else() -> None:
    assert show.BLOCK_MARK not in TEXT
    for first, end in ((0, len(TOKENS)), (5, 5), (5, 16), (16, 17), (15, 49), (7, 120)):
        marked = show.marked(made.tokenizer(), TOKENS, first, end).plain
        assert marked.split(show.BLOCK_MARK) == blocks(first, end)


def test_a_streamed_answer_has_the_same_marks() -> None:
    for first in (0, 9, 16):
        console, out = printed()
        on_token = show._streamed(console, first)
        for token in TOKENS[first:60]:
            on_token(Delta(0, token, made.tokenizer().decode([token])))
        assert out.getvalue().split(show.BLOCK_MARK) == blocks(first, 60)


def test_what_a_question_shares_with_those_before_it_is_reported_as_reused() -> None:
    subject = Subject(made.model(), made.tokenizer())
    console, out = printed()
    show.converse(console, subject, 0.4, seed=3)
    reported = [tuple(map(int, found)) for found in re.findall(r"reused (\d+) of (\d+) tokens", out.getvalue())]
    questions = draw_conversation(3, show.STORY_DISTANCE, 0.4, subject.count)[: show.ASKED]
    prompts = [show.tokens_of(subject, question.prompt) for question in questions]
    wanted = []
    for index, prompt in enumerate(prompts):
        before = max((_shared(prompt, other) for other in prompts[:index]), default=0)
        wanted.append((min(before, len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE, len(prompt)))
    assert reported == wanted
    assert reported[0][0] == 0
    assert all(reused > 100 for reused, _ in reported[1:])
    for question in questions:
        assert f"({question.asked.value}, told {question.distance} tokens before)" in out.getvalue()


def _shared(first: list[int], second: list[int]) -> int:
    """Leading tokens that are the same."""
    return next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))


def test_a_story_is_whole_and_readable_where_nobody_watches() -> None:
    subject = Subject(made.model(), made.tokenizer())
    console, out = printed(width=80)
    show.converse(console, subject, 0.4, seed=3)
    [first, *_] = draw_conversation(3, show.STORY_DISTANCE, 0.4, subject.count)
    story = first.prompt.removesuffix(first.asked.prompt)
    text = out.getvalue().replace(show.BLOCK_MARK, "")
    assert " ".join(story.split()) in " ".join(text.split())
    assert "\x1b" not in text


def test_the_reused_part_of_a_prompt_is_between_its_marks() -> None:
    for reused in (16, 64):
        found = Completion(TOKENS, [], "", "stop", reused=reused)
        within, behind = show.reused_prompt(made.tokenizer(), found).plain[1:].split("]")
        assert behind == show.marked(made.tokenizer(), TOKENS, reused).plain.replace("\n", " ")
        ends = within.replace(show.BLOCK_MARK, "").split(show.LEFT_OUT)
        text = made.tokenizer().decode(TOKENS[:reused])
        assert text.startswith(ends[0])
        assert text.endswith(ends[-1])
        assert len(ends) == (1 if reused == 16 else 2)


def test_the_verdict_is_the_questions_own() -> None:
    question = draw_questions(made.tokenizer(), 1, 0.4)[0]
    right = Completion([0] * 20, [], question.asked.answer, "stop", reused=16, chunks=(3, 1))
    assert show.verdict(question, right).plain.strip().startswith("right")
    assert show.verdict(question, right).plain.endswith("reused 16 of 20 tokens, computed 3, 1")
    wrong = Completion([0] * 20, [], " nobody.", "stop", chunks=(20,))
    assert show.verdict(question, wrong).plain.strip().startswith("wrong")


def test_the_table_counts_what_recall_counts() -> None:
    questions = draw_questions(made.tokenizer(), 2, 0.4)
    texts = [question.asked.answer if question.wanted < 500 else " nobody." for question in questions]
    texts[0] = " nobody."
    recall = recall_of(questions, [Completion([], [], text, "stop") for text in texts])
    none = Recall(dict.fromkeys(DISTANCES, 0), dict.fromkeys(DISTANCES, 2))
    table = show.recall_table([Column("one", recall, ()), Column("two", none, ())], None)
    assert [column.header for column in table.columns] == ["tokens ago", "one", "two"]
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == [*map(str, DISTANCES), "all"]
    assert cells[1] == ["50% (1/2)", *["100% (2/2)"] * 4, *["0% (0/2)"] * 3, "56% (9/16)"]
    assert cells[2] == ["0% (0/2)"] * 8 + ["0% (0/16)"]


def test_only_all_is_100_percent() -> None:
    assert show.share(999, 1000) == "99% (999/1000)"
    assert show.share(0, 0) == "-"


def test_a_fault_is_named_and_called_a_shim() -> None:
    line = show.fault_line("state").plain
    assert line.startswith("FAULT SWITCHED ON: state.")
    assert "shim for tests" in line


def test_nothing_that_is_printed_moves_the_cursor() -> None:
    assert show.printable("a\x1b[2J\rb\nc") == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b\nc"
