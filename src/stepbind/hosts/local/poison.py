"""Proof that a pass touches only blocks of live requests: all others hold NaN before it and the same NaN after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import torch

from stepbind.errors import StepError
from stepbind.groups import CacheGroup
from stepbind.hosts.local.request import Sequence

POISON = -1
"""As an integer of any width: all bits set, which every float format reads as NaN."""


class Poison:
    """Fills and checks the blocks that nobody owns, the reserved ones included."""

    def __init__(self, groups: tuple[CacheGroup, ...], *buffers: Mapping[int, torch.Tensor]) -> None:
        """`buffers`: by layer number, each of as many physical blocks as the layer's group."""
        self._groups = groups
        self._words = {
            layer: [_words(of_layer[layer], group) for of_layer in buffers if layer in of_layer]
            for group in groups
            for layer in group.layers
        }
        for words in chain.from_iterable(self._words.values()):
            words.fill_(POISON)
        self._unowned = [torch.ones(group.num_blocks, dtype=torch.bool) for group in groups]

    def before(self, sequences: Iterable[Sequence]) -> None:
        """Poison every block that none of these sequences owns any more."""
        sequences = list(sequences)
        for index, group in enumerate(self._groups):
            unowned = torch.ones(group.num_blocks, dtype=torch.bool)
            unowned[[block for sequence in sequences for block in sequence.tables[index] if block >= 0]] = False
            freed = torch.nonzero(unowned & ~self._unowned[index]).squeeze(1)
            self._unowned[index] = unowned
            for layer in group.layers:
                for words in self._words[layer]:
                    words[freed] = POISON

    def after(self) -> None:
        """Raises `StepError` naming group, layer and block if the pass wrote to one that nobody owns."""
        for group, unowned in zip(self._groups, self._unowned, strict=True):
            for layer in group.layers:
                for words in self._words[layer]:
                    touched = (words != POISON).any(dim=1).cpu() & unowned
                    if touched.any():
                        raise StepError(
                            f"group {group.name!r} layer {layer}",
                            f"a write to block {int(touched.nonzero()[0])}, which no live request owns",
                            "writes to the step's own blocks alone",
                        )


def _words(buffer: torch.Tensor, group: CacheGroup) -> torch.Tensor:
    """[physical blocks, words], as wide words as the block's length allows."""
    blocks = buffer.view(torch.int8).reshape(group.num_blocks, -1)
    return blocks.view(torch.int64) if blocks.shape[1] % 8 == 0 else blocks
