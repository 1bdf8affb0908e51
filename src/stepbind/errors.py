"""The one error family: every message names the field, what came, and what was expected."""

from __future__ import annotations


class StepError(ValueError):
    """Something handed to stepbind does not fit.

    `field`, `got` and `expected` are kept so that a host can log them apart; `str()` is one sentence.
    """

    def __init__(self, field: str, got: object, expected: str) -> None:
        super().__init__(f"{field}: got {got}, expected {expected}")
        self.field = field
        self.got = got
        self.expected = expected


class BlockFaultError(StepError):
    """A step needed block table entries that were missing or out of range. Nothing was written through them."""


class NotBoundError(StepError):
    """A layer asked for the forward context outside of `bind`."""


class UnknownModelError(StepError):
    """A model whose layers stepbind does not know how to feed."""


class RequestError(StepError):
    """One request cannot be served; the others are not affected."""
