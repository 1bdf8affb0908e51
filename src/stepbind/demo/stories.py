"""Stories that tell facts early and ask for them late, and the questions.

A story is a row of scenes. A scene brings in one person by name; what it tells of that person may follow with "they"
and "their", with idle sentences in between: who is meant has to be carried across every block boundary on the way. A
fact is told once. Questions stand between the scenes, and any of them can be asked at the story's end. Everything is
drawn from one `random.Random`, so a seed is a story.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field

from stepbind.demo.words import (
    ARRIVES,
    DOES,
    FALLS,
    NAMES,
    NEAR,
    PLACES,
    THINGS,
    TIMES,
    TOWNS,
    TRADES,
    WEATHER,
)

OWN = {
    "town": TOWNS,
    "trade": TRADES,
    "code": [str(code) for code in range(10, 100)],
    "flock": [str(count) for count in range(2, 7)],
}
"""What can be told of a person, and what it may be."""

KINDS = ("town", "trade", "code", "keeper", "together")
"""What can be asked: somebody's town, trade or code, who keeps a thing, and how many two flocks make."""

CAST = 16
"""People in a story, at the most."""

NAMED = {"hybrid": 0.4, "sparse-mla": 1.0}
"""Of the facts, how many are told by name rather than by "they" and "their", for each checkpoint. Layers that only
attend have no state to carry a person in: they learn from names alone."""

OPENING = "Once upon a time."
STOP = "\n"
"""How every story begins, and how every answer ends: it is one line."""


Fact = tuple[str, str]
"""What sort of fact, and about whom or what."""


class Part(enum.IntEnum):
    """What a piece of text is: story or question, the words of an answer, or a value that a question asks for."""

    STORY, WORDS, VALUE = range(3)


@dataclass(frozen=True)
class Asked:
    """A question with its only right answer, and the facts of the story that it asks for."""

    kind: str
    question: str
    words: tuple[str, ...]  # of the answer, before each value
    values: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def prompt(self) -> str:
        return f"\nQ: {self.question}\nA:"

    @property
    def answer(self) -> str:
        """With its leading space and its last newline."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def value(self) -> str:
        """What the answer comes to."""
        return self.values[-1]

    @property
    def pieces(self) -> list[Piece]:
        """The answer, each value by itself."""
        told = zip(self.words, self.values, strict=True)
        found = [
            Piece(f" {text}", part=part)
            for pair in told
            for text, part in zip(pair, (Part.WORDS, Part.VALUE), strict=True)
        ]
        return [*found, Piece(f".{STOP}", part=Part.WORDS)]


@dataclass(frozen=True)
class Piece:
    """Some text, and the fact whose telling ends here."""

    text: str
    told: Fact | None = None
    part: Part = Part.STORY


@dataclass
class Story:
    """A story in the making, and what was told so far."""

    draw: random.Random
    named: float  # share of the facts told by name
    cast: int = CAST  # people at the most
    people: list[str] = field(default_factory=list)
    told: dict[Fact, str] = field(default_factory=dict)

    def scene(self) -> list[Piece]:
        """Some sentences: somebody new, or nothing that matters."""
        if len(self.people) < self.cast and (self.draw.random() < 0.6 or not self.people):
            return self._meet(self.draw.choice([name for name in NAMES if name not in self.people]))
        return [Piece(self.idle()) for _ in range(self.draw.randint(1, 2))]

    def idle(self) -> str:
        """A sentence about the weather."""
        return self._fill(f" The {self.draw.choice(WEATHER)} {self.draw.choice(FALLS)} the {{place}} {{time}}.")

    def ask(self, kind: str | None = None) -> Asked | None:
        """A question about what was told, of any of the KINDS or of this one; None where nothing of it was told."""
        kind = kind or self.draw.choice(KINDS)
        known = [fact for fact in self.told if fact[0] == ("flock" if kind == "together" else kind)]
        if len(known) < (2 if kind == "together" else 1):
            return None
        first = self.draw.choice(known)
        if kind == "together":
            return self._together(first[1], self.draw.choice([fact for fact in known if fact != first])[1])
        question = f"Who keeps the {first[1]}?" if kind == "keeper" else f"What is the {kind} of {first[1]}?"
        whose = f"the {first[1]}" if kind == "keeper" else first[1]
        return Asked(kind, question, (f"The {kind} of {whose} is",), (self.told[first],), (first,))

    def _together(self, first: str, second: str) -> Asked:
        facts = ("flock", first), ("flock", second)
        counts = [int(self.told[fact]) for fact in facts]
        words = f"The flock of {first} is", f"and the flock of {second} is", "which makes"
        question = f"How many are the flocks of {first} and {second}?"
        return Asked("together", question, words, (*map(str, counts), str(sum(counts))), facts)

    def _meet(self, name: str) -> list[Piece]:
        self.people.append(name)
        pieces = [Piece(_sentence(self._fill(self.draw.choice(ARRIVES), name=name)))]
        for kind in self.draw.sample((*OWN, "keeper"), self.draw.randint(1, 4)):
            if self.draw.random() < 0.3:
                pieces.append(Piece(f" They {self._fill(self.draw.choice(DOES))}."))
            pieces.append(self._keep(name) if kind == "keeper" else self._own(kind, name))
        return pieces

    def _own(self, kind: str, name: str) -> Piece:
        value = self.draw.choice(OWN[kind])
        self.told[kind, name] = value
        whose = f"The {kind} of {name}" if self.draw.random() < self.named else f"Their {kind}"
        return Piece(f" {whose} is {value}.", (kind, name))

    def _keep(self, name: str) -> Piece:
        free = [thing for thing in THINGS if ("keeper", thing) not in self.told]
        if not free:
            return Piece(self.idle())
        thing = self.draw.choice(free)
        self.told["keeper", thing] = name
        told = f"The keeper of the {thing} is {name}" if self.draw.random() < self.named else f"They keep the {thing}"
        return Piece(f" {told}.", ("keeper", thing))

    def _fill(self, template: str, **given: str) -> str:
        return template.format(
            place=self.draw.choice(PLACES), time=self.draw.choice(TIMES), near=self.draw.choice(NEAR), **given
        )


def story_pieces(draw: random.Random, named: float, *, characters: int) -> list[Piece]:
    """A story of at least so many characters with questions in it.

    Nothing is asked twice: whoever learns from it could answer the second time from the first answer. How many people
    it has and how often it asks is its own; what is left is asked from two thirds of it on.
    """
    story = Story(draw, named, draw.randint(3, CAST))
    pieces, length, rate, asked = [Piece(OPENING)], 0, draw.uniform(0.0, 0.8), set[Fact]()
    while length < characters:
        added = [] if length > characters * 2 / 3 and draw.random() < 0.8 else story.scene()
        while not added or draw.random() < rate:
            question = _new_question(story, asked)
            if question is None:
                break
            asked.update(question.facts)
            added += [Piece(question.prompt), *question.pieces]
        added = added or story.scene()
        pieces += added
        length += sum(len(piece.text) for piece in added)
    return pieces


def _new_question(story: Story, asked: set[Fact]) -> Asked | None:
    """One about nothing that was asked before, as far as a few tries find it."""
    for _ in range(6):
        question = story.ask()
        if question is not None and asked.isdisjoint(question.facts):
            return question
    return None


def _sentence(text: str) -> str:
    return f" {text[0].upper()}{text[1:]}."
