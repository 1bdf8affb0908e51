"""Host memory that small copies to a GPU start from, kept between steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

SLOTS_OF_A_PAGE = 16


@dataclass(frozen=True, eq=False)
class Slot:
    """What one copy starts from: `buffer` [S] int64, and its parts, a descriptor's `words` and `lengths` behind it."""

    buffer: torch.Tensor
    words: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class _Page:
    slots: tuple[Slot, ...]
    copied: torch.cuda.Event | None  # recorded behind the copies out of the page; None on the CPU, where they are over


class Staging:
    """Slots of `size` int64 words of which `num_words` are a descriptor's; `pinned` for copies to a GPU.

    Slots are taken in turn, one for each copy, and none is written again before the copy out of it is done: an event
    behind a page's last copy says so, and is asked, never waited for. While it has not happened, another page is
    taken, or made. The fills of one arena write the same buffers and so follow each other on the device; an event
    behind the last of some copies is therefore behind them all.
    """

    def __init__(self, size: int, num_words: int, *, pinned: bool) -> None:
        self._shape = (SLOTS_OF_A_PAGE, size)
        self._num_words = num_words
        self._pinned = pinned
        self._pages = [self._new_page()]  # the one in use last, the one that was left longest ago first
        self._taken = 0

    def take(self) -> Slot:
        """A slot that no copy reads. The copy out of it has to be on the current stream, before the next `take`."""
        if self._taken == SLOTS_OF_A_PAGE:
            self._turn()
        slot = self._pages[-1].slots[self._taken]
        self._taken += 1
        return slot

    def _turn(self) -> None:
        """Leave the page in use for one whose copies are done."""
        left, oldest = self._pages[-1], self._pages[0]
        if left.copied is not None:
            left.copied.record()
        if oldest.copied is None or oldest.copied.query():
            self._pages.append(self._pages.pop(0))
        else:
            self._pages.append(self._new_page())
        self._taken = 0

    def _new_page(self) -> _Page:
        page = torch.zeros(self._shape, dtype=torch.int64, pin_memory=self._pinned)
        slots = []
        for buffer in page.unbind():
            values = buffer.numpy()
            slots.append(Slot(buffer, values[: self._num_words], values[self._num_words :].view(np.int32)))
        return _Page(tuple(slots), torch.cuda.Event() if self._pinned else None)
