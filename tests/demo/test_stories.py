"""Stories tell what they ask for: a reader that knows nothing but the sentences finds the same answers."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepbind.demo.questions import DISTANCES, draw_conversation, draw_question
from stepbind.demo.stories import KINDS, OPENING, Part, Piece, story_pieces
from stepbind.demo.words import NAMES

NAME = "|".join(NAMES)
TOGETHER = r"How many are the flocks of (\w+) and (\w+)\?"
seeds = st.integers(0, 2**32)


class Reader:
    """Reads sentence by sentence; "they" are whoever was named last."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, str], str] = {}
        self.who = ""

    def read(self, text: str) -> None:
        for sentence in text.split("."):
            self._sentence(sentence.strip())

    def _sentence(self, text: str) -> None:
        if found := re.fullmatch(r"Their (town|trade|code|flock) is (\w+)", text):
            self.told[found[1], self.who] = found[2]
        elif found := re.fullmatch(r"The (\w+) of (\w+) is (\w+)", text):
            self.told[found[1], found[2]] = found[3]
        elif found := re.fullmatch(r"The keeper of the (\w+) is (\w+)", text):
            self.told["keeper", found[1]] = found[2]
        elif found := re.fullmatch(r"They keep the (\w+)", text):
            self.told["keeper", found[1]] = self.who
        if found := re.search(rf"\b({NAME})\b", text):
            self.who = found[1]

    def answer(self, question: str) -> str:
        if found := re.fullmatch(r"What is the (\w+) of (\w+)\?", question):
            return self.told[found[1], found[2]]
        if found := re.fullmatch(r"Who keeps the (\w+)\?", question):
            return self.told["keeper", found[1]]
        if found := re.fullmatch(TOGETHER, question):
            return str(int(self.told["flock", found[1]]) + int(self.told["flock", found[2]]))
        raise AssertionError(question)


def asked_in(piece: Piece) -> str:
    return piece.text.split("Q: ")[1].split("\n")[0]


def asked_and_answered(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Of each question in a story: what it asks, and its answer's line."""
    text = "".join(piece.text for piece in pieces)
    return re.findall(r"\nQ: (.*)\nA: (.*)\n", text)


@given(seeds)
def test_every_answer_in_a_story_is_what_was_told_before(seed: int) -> None:
    reader, text = Reader(), "".join(piece.text for piece in story_pieces(random.Random(seed), 0.4, characters=4000))
    before, *asked = text.split("\nQ: ")
    reader.read(before)
    for part in asked:
        question, rest = part.split("\nA: ")
        line, *prose = rest.split("\n")
        assert line.removesuffix(".").split(" ")[-1] == reader.answer(question)
        if question.startswith("How many"):
            counts = re.findall(r"flock of (\w+) is (\d)", line)
            assert [(name, reader.told["flock", name]) for name, _ in counts] == counts
            assert len(counts) == 2
        reader.read("\n".join(prose))


@given(seeds)
def test_no_fact_is_asked_for_twice(seed: int) -> None:
    asked: set[str] = set()
    for question, _ in asked_and_answered(story_pieces(random.Random(seed), 0.4, characters=4000)):
        found = re.fullmatch(TOGETHER, question)
        for fact in (f"flock {found[1]}", f"flock {found[2]}") if found else (question,):
            assert fact not in asked
            asked.add(fact)


@given(seeds)
def test_no_fact_is_told_twice(seed: int) -> None:
    told = [piece.told for piece in story_pieces(random.Random(seed), 0.4, characters=4000) if piece.told is not None]
    assert len(told) == len(set(told))


@given(seeds)
def test_values_are_the_words_of_an_answer_that_have_to_be_known(seed: int) -> None:
    pieces = story_pieces(random.Random(seed), 0.4, characters=2000)
    known = [piece.text.strip() for piece in pieces if piece.part is Part.VALUE]
    wanted = []
    for question, line in asked_and_answered(pieces):
        wanted += re.findall(r"\d+", line) if question.startswith("How many") else [line.strip(".").split(" ")[-1]]
    assert known == wanted


def test_a_seed_is_a_story() -> None:
    first, again, other = (story_pieces(random.Random(seed), 0.4, characters=3000) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first[0].text == OPENING
    assert sum(len(piece.text) for piece in first) >= 3000


def words(text: str) -> int:
    return len(re.findall(r"\w+|\S", text))


@pytest.mark.parametrize("distance", DISTANCES)
def test_a_question_asks_for_what_was_told_so_far_back(distance: int) -> None:
    for seed in range(8):
        question = draw_question(seed, distance, 0.4, words)
        assert question == draw_question(seed, distance, 0.4, words)
        story, asked = question.prompt.split("\nQ: ")
        reader = Reader()
        reader.read(story)
        assert reader.answer(asked.split("\n")[0]) == question.asked.value
        assert 0.8 * distance <= question.distance <= max(distance, 24)
        sentences, told = story.split("."), Reader()
        ends = [
            words(".".join(sentences[index + 1 :])) + words(question.asked.prompt) for index in range(len(sentences))
        ]
        before = [end for end, text in zip(ends, sentences, strict=True) if _changes(told, text, asked)]
        assert abs(min(before) - question.distance) <= 2 or question.asked.kind == "together"


def test_a_conversation_asks_one_story_for_everything() -> None:
    for seed in range(8):
        questions = draw_conversation(seed, 256, 0.4, words)
        assert questions == draw_conversation(seed, 256, 0.4, words)
        [story] = {question.prompt.removesuffix(question.asked.prompt) for question in questions}
        reader = Reader()
        reader.read(story)
        for question in questions:
            assert reader.answer(question.asked.question) == question.asked.value
        assert sorted(question.asked.kind for question in questions) == sorted(KINDS)
        assert 0.8 * 256 <= questions[0].distance <= questions[0].wanted == 256


def _changes(reader: Reader, sentence: str, asked: str) -> bool:
    """Whether the answer is another one, or there at all, after this sentence."""
    question = asked.split("\n")[0]

    def now() -> str | None:
        try:
            return reader.answer(question)
        except KeyError:
            return None

    before = now()
    reader.read(sentence)
    return now() != before


def test_only_the_right_value_is_right() -> None:
    question = draw_question(3, 64, 0.4, words)
    assert question.right(question.asked.answer)
    assert question.right(f" {question.asked.value}.\n The rain")
    assert not question.right(question.asked.answer.replace(question.asked.value, "nobody"))
    assert not question.right("")
