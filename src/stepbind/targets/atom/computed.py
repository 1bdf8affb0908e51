"""All that ATOM's metadata is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from stepbind.targets.atom.read import Offsets
from stepbind.targets.atom.shared import SharedValues
from stepbind.targets.atom.values import GroupValues, Int32


class StateSlots(dict[tuple[int, bool], torch.Tensor]):
    """State slots [B] int32 by (group number, is prefill). `[]` makes a group's tensor when it is first asked for, out
    of blocks [groups, n, B]: layers ask for those that they write to, few for others."""

    def __init__(self, blocks: Int32, which: int, index_of: dict[int, int], is_prefill: bool) -> None:
        self._blocks, self._which, self._index_of, self._is_prefill = blocks, which, index_of, is_prefill

    def of(self, number: int) -> torch.Tensor:
        return self[number, self._is_prefill]

    def __missing__(self, key: tuple[int, bool]) -> torch.Tensor:
        number, is_prefill = key
        if is_prefill != self._is_prefill or number not in self._index_of:
            raise KeyError(key)
        slots = self[key] = torch.from_numpy(self._blocks[self._index_of[number], self._which])
        return slots


class States(NamedTuple):
    read: StateSlots
    write: StateSlots


class Computed(NamedTuple):
    """All that ATOM's metadata is made of. B rows, T tokens.

    query_start_host: the host's own offsets, for Gated DeltaNet. seq_lens: [B] int32 context lengths. max_query,
    max_context, total_context: tokens. has_prior: [B] bool, in a prefill with Gated DeltaNet layers; has_prefix:
    whether the host says so of any row. block_table:
    [B, C] int32, slot_mapping: [T] int64, both of the first group as the reference has them. state_read, state_write:
    [B] int32, of the first group too. states: of all groups, where they stand in no tensors yet.
    """

    is_dummy: bool
    num_rows: int
    num_tokens: int
    shared: SharedValues
    query_start_host: Offsets
    seq_lens: torch.Tensor
    max_query: int
    max_context: int
    total_context: int
    has_prior: torch.Tensor | None
    has_prefix: bool
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    groups: Sequence[GroupValues]
    state_read: torch.Tensor | None
    state_write: torch.Tensor | None
    states: States | None = None
