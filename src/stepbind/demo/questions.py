"""Fresh questions at a wanted distance: a story, something that was told so many tokens ago, and what it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from stepbind.demo.stories import KINDS, OPENING, Asked, Fact, Piece, Story

DISTANCES = (16, 32, 64, 128, 256, 512, 1000, 2000)
"""Tokens between the telling and the answer, at the most; at least four fifths of it, and the question's own tokens."""

AHEAD = 200
"""Tokens of story before the telling, at the most."""


@dataclass(frozen=True)
class Question:
    """A prompt and its only right answer. distance: tokens from the end of the telling to the end of the prompt, of
    `wanted` at the most (of 24 at the shortest, since a question alone can take so many)."""

    prompt: str
    asked: Asked
    distance: int
    wanted: int

    def right(self, text: str) -> bool:
        """Whether an answer says what is so. Only the value counts, not the words around it."""
        line = text.split("\n")[0].strip()
        return line.removesuffix(".").split(" ")[-1:] == [self.asked.value]


def draw_question(seed: int, distance: int, named: float, count: Callable[[str], int]) -> Question:
    """The question of this seed about something told `distance` tokens ago (`count` gives a text's tokens), in a story
    that tells this share of its facts by name."""
    draw = random.Random(seed)
    while True:
        question = _tell(draw, distance, named, count).question_at(distance)
        if question is not None:
            return question


def draw_conversation(seed: int, distance: int, named: float, count: Callable[[str], int]) -> list[Question]:
    """A question of each kind about one story, as `draw_question` has it. The first is about something told `distance`
    tokens ago, the others about anything; each prompt is the whole story with that question alone behind it."""
    draw = random.Random(seed)
    while True:
        told = _tell(draw, distance, named, count)
        first = told.question_at(distance)
        if first is None:
            continue
        asked = [told.story.ask(kind) for kind in KINDS if kind != first.asked.kind]
        others = [told.question(each) for each in asked if each is not None]
        if len(others) == len(asked):
            return [first, *others]


@dataclass(frozen=True)
class _Told:
    """A story up to where it is asked about: `length` tokens, and by fact the tokens up to the end of its telling."""

    story: Story
    text: str
    length: int
    ends: dict[Fact, int]
    count: Callable[[str], int]

    def question_at(self, distance: int) -> Question | None:
        """One about something told so long ago; None where a few tries find none."""
        kinds = self.story.draw.sample(KINDS, len(KINDS))
        for kind in kinds:
            for _ in range(4):
                asked = self.story.ask(kind)
                if asked is None:
                    break
                if 0.8 * distance <= self._ago(asked) <= max(distance, 24):
                    return self.question(asked, distance)
        return None

    def question(self, asked: Asked, wanted: int | None = None) -> Question:
        """With its prompt. `wanted`: as in `Question`, what it is if left out."""
        ago = self._ago(asked)
        return Question(self.text + asked.prompt, asked, ago, ago if wanted is None else wanted)

    def _ago(self, asked: Asked) -> int:
        return self.length + self.count(asked.prompt) - min(self.ends[fact] for fact in asked.facts)


def _tell(draw: random.Random, distance: int, named: float, count: Callable[[str], int]) -> _Told:
    """A story of a little more than `distance` tokens."""
    story, pieces, length = Story(draw, named), [Piece(OPENING)], count(OPENING)
    ends: dict[Fact, int] = {}
    goal = distance + draw.randint(AHEAD // 10, AHEAD)
    while length < goal:
        for piece in story.scene():
            pieces.append(piece)
            length += count(piece.text)
            if piece.told is not None:
                ends[piece.told] = length
    return _Told(story, "".join(piece.text for piece in pieces), length, ends, count)
