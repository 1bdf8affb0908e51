"""Proof that a pass touches only blocks of live requests: all others hold NaN before it and the same NaN after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from stepbind.errors import StepError
from stepbind.groups import CacheGroup
from stepbind.hosts.local.request import Sequence

POISON = 0xFF
"""Every float format reads bytes of all ones as NaN."""


class Poison:
    """Fills and checks the blocks that nobody owns, the reserved ones included."""

    def __init__(self, groups: tuple[CacheGroup, ...], buffers: Mapping[int, torch.Tensor]) -> None:
        self._groups = groups
        self._bytes = {
            layer: buffers[layer].view(torch.uint8).reshape(group.num_blocks, -1)
            for group in groups
            for layer in group.layers
        }
        self._unowned: list[torch.Tensor] = []

    def before(self, sequences: Iterable[Sequence]) -> None:
        """Poison every block that none of these sequences owns."""
        sequences = list(sequences)
        self._unowned = []
        for index, group in enumerate(self._groups):
            unowned = torch.ones(group.num_blocks, dtype=torch.bool)
            owned = [block for sequence in sequences for block in sequence.tables[index] if block >= 0]
            unowned[owned] = False
            blocks = torch.nonzero(unowned).squeeze(1)
            self._unowned.append(blocks)
            for layer in group.layers:
                self._bytes[layer][blocks] = POISON

    def after(self) -> None:
        """Raises `StepError` naming group, layer and block if the pass wrote to one that nobody owns."""
        for group, blocks in zip(self._groups, self._unowned, strict=True):
            for layer in group.layers:
                touched = (self._bytes[layer][blocks] != POISON).any(dim=1)
                if touched.any():
                    block = int(blocks[torch.nonzero(touched)[0]])
                    raise StepError(
                        f"group {group.name!r} layer {layer}",
                        f"a write to block {block}, which no live request owns",
                        "writes to the step's own blocks alone",
                    )
