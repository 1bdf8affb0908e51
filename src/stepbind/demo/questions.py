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
        question = _try(draw, distance, named, count)
        if question is not None:
            return question


def _try(draw: random.Random, distance: int, named: float, count: Callable[[str], int]) -> Question | None:
    story, pieces, length = Story(draw, named), [Piece(OPENING)], count(OPENING)
    told: dict[Fact, int] = {}  # by fact: tokens up to the end of its telling
    goal = distance + draw.randint(AHEAD // 10, AHEAD)
    while length < goal:
        for piece in story.scene():
            pieces.append(piece)
            length += count(piece.text)
            if piece.told is not None:
                told[piece.told] = length
    kinds = draw.sample(KINDS, len(KINDS))
    for kind in kinds:
        for _ in range(4):
            asked = story.ask(kind)
            if asked is None:
                break
            ago = length + count(asked.prompt) - min(told[fact] for fact in asked.facts)
            if 0.8 * distance <= ago <= max(distance, 24):
                return Question("".join(piece.text for piece in pieces) + asked.prompt, asked, ago, distance)
    return None
