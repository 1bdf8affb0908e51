"""Proof that a pass touches only blocks of live requests: all others hold NaN before it and the same NaN after it, and
remembered prefixes hold what they held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import torch

from stepbind.errors import StepError
from stepbind.groups import CacheGroup
from stepbind.hosts.local.prefix import Node
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
        self._remembered: list[list[int]] = [[] for _ in groups]
        self._before: dict[int, list[torch.Tensor]] = {}  # by layer: the words of remembered blocks

    def before(self, sequences: Iterable[Sequence], remembered: Iterable[Node] = ()) -> None:
        """Poison every block that none of these sequences and nodes owns any more, and note what the nodes' hold."""
        sequences, remembered = list(sequences), list(remembered)
        for index, group in enumerate(self._groups):
            shared = [node.blocks[index] for node in remembered if node.blocks[index] >= 0]
            unowned = torch.ones(group.num_blocks, dtype=torch.bool)
            unowned[[block for sequence in sequences for block in sequence.tables[index] if block >= 0]] = False
            unowned[shared] = False
            freed = torch.nonzero(unowned & ~self._unowned[index]).squeeze(1)
            self._unowned[index], self._remembered[index] = unowned, shared
            for layer in group.layers:
                for words in self._words[layer]:
                    words[freed] = POISON
                self._before[layer] = [words[shared] for words in self._words[layer]]

    def after(self) -> None:
        """Raises `StepError` naming group, layer and block if the pass wrote to one that nobody owns, or that is
        remembered for others."""
        for group, unowned, shared in zip(self._groups, self._unowned, self._remembered, strict=True):
            for layer in group.layers:
                for words, before in zip(self._words[layer], self._before[layer], strict=True):
                    touched = (words != POISON).any(dim=1).cpu() & unowned
                    _raise_if(touched.nonzero(), group, layer, "which no live request owns")
                    changed = (words[shared] != before).any(dim=1).cpu()
                    _raise_if(torch.tensor(shared)[changed], group, layer, "which is remembered as a prefix")


def _raise_if(blocks: torch.Tensor, group: CacheGroup, layer: int, whose: str) -> None:
    if blocks.numel():
        raise StepError(
            f"group {group.name!r} layer {layer}",
            f"a write to block {int(blocks[0])}, {whose}",
            "writes to the step's own blocks alone",
        )


def _words(buffer: torch.Tensor, group: CacheGroup) -> torch.Tensor:
    """[physical blocks, words], as wide words as the block's length allows."""
    blocks = buffer.view(torch.int8).reshape(group.num_blocks, -1)
    return blocks.view(torch.int64) if blocks.shape[1] % 8 == 0 else blocks
