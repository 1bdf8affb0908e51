"""Turning tokens into text as they come: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Tokens that one character can be spread over (UTF-8 bytes). More pending ones are bytes that make no character."""


class TextStream:
    """The text of one sequence's new tokens, released piece by piece. Without a tokenizer there is no text."""

    def __init__(self, tokenizer: Any | None, stop: tuple[str, ...], *, lazy: bool = False) -> None:
        """`lazy`: nothing is decoded before `finish`."""
        self._tokenizer = tokenizer
        self._lazy = lazy or tokenizer is None
        self._stop = stop
        self._tokens: list[int] = []
        self._start = 0  # decoding starts here, a little before what is new: tokens join differently at an edge
        self._decoded = 0  # tokens whose text is in `_text`
        self._text = ""
        self._released = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All that was released."""
        return self._text[: self._released]

    def push(self, token: int) -> str:
        """The text that became certain with this token. `stopped` is set once a stop string has appeared."""
        self._tokens.append(token)
        if self._lazy:
            return ""
        self._decode(final=False)
        return self._release(final=False)

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        self._decode(final=True)
        return self._release(final=True)

    def _decode(self, final: bool) -> None:
        if self._tokenizer is None or self._decoded == len(self._tokens):
            return
        before = self._tokenizer.decode(self._tokens[self._start : self._decoded], skip_special_tokens=True)
        after = self._tokenizer.decode(self._tokens[self._start :], skip_special_tokens=True)
        pending = len(self._tokens) - self._decoded
        if not final and after.endswith(UNFINISHED) and pending < LONGEST_CHARACTER:
            return
        self._text += after[len(before) :]
        self._start, self._decoded = self._decoded, len(self._tokens)

    def _release(self, final: bool) -> str:
        if self.stopped:
            return ""
        end = len(self._text)
        # What could begin a stop string is never released, so none begins before `_released`. The one that is
        # complete first counts, as it does when characters come one by one.
        places = [(self._text.find(text, self._released), text) for text in self._stop]
        found = [(at + len(text), at) for at, text in places if at >= 0]
        if found:
            self.stopped = True
            _, end = min(found)
        elif not final:
            end -= max((_overlap(self._text, text) for text in self._stop), default=0)
        piece = self._text[self._released : end]
        self._released = max(self._released, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` could begin with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
