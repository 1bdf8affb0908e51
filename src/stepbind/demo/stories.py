"""Stories that tell facts early and ask for them late, and the questions.

A story is a row of scenes. A scene brings in one person by name; what it tells of that person follows with "she" or
"he", with idle sentences in between: who is meant has to be carried across every block boundary on the way. A fact is
told once. Questions stand between the scenes, and any of them can be asked at the story's end. Everything is drawn
from one `random.Random`, so a seed is a story.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from stepbind.demo.words import (
    ANIMALS,
    ARRIVES,
    DOES,
    FALLS,
    MEN,
    NEAR,
    PLACES,
    THINGS,
    TIMES,
    TOWNS,
    TRADES,
    WEATHER,
    WOMEN,
)

KINDS = ("town", "trade", "code", "keeper", "together")
"""What can be asked: where somebody lives, what somebody is, a door's code, who keeps a thing, a sum of two counts."""

CAST = 24
"""People in a story, at the most."""

OPENING = "Once upon a time."
STOP = "\n"
"""How every story begins, and how every answer ends: it is one line."""


Fact = tuple[str, str]
"""What sort of fact, and about whom or what."""


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
        return [each for words, value in told for each in (Piece(f" {words}"), Piece(f" {value}", value=True))] + [
            Piece(f".{STOP}")
        ]


@dataclass(frozen=True)
class Piece:
    """Some text. `told` names the fact whose telling ends here; `value` says that it is what a question asks for."""

    text: str
    told: Fact | None = None
    value: bool = False


@dataclass
class Story:
    """A story in the making, and what was told so far."""

    draw: random.Random
    cast: int = CAST  # people at the most
    people: list[str] = field(default_factory=list)
    towns: dict[str, str] = field(default_factory=dict)
    trades: dict[str, str] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    keepers: dict[str, str] = field(default_factory=dict)

    def scene(self) -> list[Piece]:
        """Some sentences: somebody new, or nothing that matters."""
        if len(self.people) < self.cast and (self.draw.random() < 0.5 or not self.people):
            return self._meet(self.draw.choice([name for name in WOMEN + MEN if name not in self.people]))
        return [Piece(self.idle()) for _ in range(self.draw.randint(1, 3))]

    def idle(self) -> str:
        """A sentence about the weather."""
        return self._fill(f" The {self.draw.choice(WEATHER)} {self.draw.choice(FALLS)} the {{place}} {{time}}.")

    def ask(self, kind: str | None = None, subject: str | None = None) -> Asked | None:
        """A question about what was told, of any kind or of this one; None where nothing of it was told."""
        makers: dict[str, Callable[[str | None], Asked | None]] = {
            "town": lambda name: self._ask_person("town", self.towns, name),
            "trade": lambda name: self._ask_person("trade", self.trades, name),
            "code": lambda name: self._ask_person("code", self.codes, name),
            "keeper": self._ask_keeper,
            "together": self._ask_together,
        }
        return makers[kind or self.draw.choice(KINDS)](subject)

    def _meet(self, name: str) -> list[Piece]:
        self.people.append(name)
        tell = [self._town, self._trade, self._code, self._thing, self._animals]
        chosen = self.draw.sample(tell, self.draw.randint(1, 4))
        pieces = [Piece(_sentence(self._fill(self.draw.choice(ARRIVES), name=name)))]
        pronoun = "She" if name in WOMEN else "He"
        for telling in chosen:
            if self.draw.random() < 0.3:
                pieces.append(Piece(f" {pronoun} {self._fill(self.draw.choice(DOES))}."))
            pieces.append(telling(name, pronoun))
        return pieces

    def _town(self, name: str, pronoun: str) -> Piece:
        self.towns[name] = self.draw.choice(TOWNS)
        return Piece(
            f" {pronoun} {self.draw.choice(('lives in', 'has a house in'))} {self.towns[name]}.", ("town", name)
        )

    def _trade(self, name: str, pronoun: str) -> Piece:
        self.trades[name] = self.draw.choice(TRADES)
        return Piece(f" {pronoun} {self.draw.choice(('is a', 'works as a'))} {self.trades[name]}.", ("trade", name))

    def _code(self, name: str, pronoun: str) -> Piece:
        self.codes[name] = str(self.draw.randint(10, 99))
        whose = "her" if name in WOMEN else "his"
        return Piece(f" The code of {whose} door is {self.codes[name]}.", ("code", name))

    def _animals(self, name: str, pronoun: str) -> Piece:
        self.counts[name] = self.draw.randint(2, 6)
        return Piece(f" {pronoun} owns {self.counts[name]} {self.draw.choice(ANIMALS)}.", ("count", name))

    def _thing(self, name: str, pronoun: str) -> Piece:
        if len(self.keepers) == len(THINGS):
            return Piece(self.idle())
        thing = ""
        while not thing or thing in self.keepers:
            thing = self.draw.choice(THINGS)
        self.keepers[thing] = name
        return Piece(f" {pronoun} {self.draw.choice(('keeps', 'has found'))} the {thing}.", ("keeper", thing))

    def _ask_person(self, kind: str, told: dict[str, str], name: str | None) -> Asked | None:
        if not told:
            return None
        name = name or self.draw.choice(list(told))
        question, opening = {
            "town": (f"Where does {name} live?", f"{name} lives in"),
            "trade": (f"What is {name}?", f"{name} is a"),
            "code": (f"What is the code of {name}?", f"The code of {name} is"),
        }[kind]
        return Asked(kind, question, (opening,), (told[name],), ((kind, name),))

    def _ask_keeper(self, thing: str | None) -> Asked | None:
        if not self.keepers:
            return None
        thing = thing or self.draw.choice(list(self.keepers))
        question, opening = f"Who keeps the {thing}?", f"The {thing} is kept by"
        return Asked("keeper", question, (opening,), (self.keepers[thing],), (("keeper", thing),))

    def _ask_together(self, first: str | None) -> Asked | None:
        if len(self.counts) < 2:
            return None
        first = first or self.draw.choice(list(self.counts))
        second = self.draw.choice([name for name in self.counts if name != first])
        counts = self.counts[first], self.counts[second]
        return Asked(
            "together",
            f"How many animals do {first} and {second} own?",
            (f"{first} owns", f"and {second} owns", "which is"),
            (str(counts[0]), str(counts[1]), str(sum(counts))),
            (("count", first), ("count", second)),
        )

    def _fill(self, template: str, **given: str) -> str:
        return template.format(
            place=self.draw.choice(PLACES), time=self.draw.choice(TIMES), near=self.draw.choice(NEAR), **given
        )


def story_pieces(draw: random.Random, *, characters: int) -> list[Piece]:
    """A story of at least so many characters with questions in it.

    Nothing is asked twice: whoever learns from it could answer the second time from the first answer. How many people
    it has and how often it asks is its own; what is left is asked from two thirds of it on.
    """
    story = Story(draw, draw.randint(3, CAST))
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
