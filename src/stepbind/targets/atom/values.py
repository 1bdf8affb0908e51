"""What the layers of each group read: slots of tokens, and slots that states are read from and written to.

`values_of` computes them on the CPU, for any pass, good or bad; `usual.py` does for most passes in fewer operations.
The values are those of the plan (`from_plan`), which is what a GPU uses; tests hold one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stepbind.errors import BlockFaultError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.plan.plan import PagedPlan, Plan
from stepbind.step import Granularity
from stepbind.targets.atom.read import Offsets

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


def highest(array: npt.NDArray[np.integer]) -> int:
    """The largest element: several times as fast as `max` where there are few."""
    return array.item(array.argmax())


def lowest(array: npt.NDArray[np.integer]) -> int:
    return array.item(array.argmin())


class GroupValues(NamedTuple):
    """One cache group in a pass of B rows and T tokens. number: the host's. block_table: [B, C] int32 as the host has
    it. slot_mapping: [T] int64, of attention and MLA groups; state_read and state_write: [B] int32, of Gated DeltaNet
    groups. -1 means none in all of them."""

    number: int
    kind: GroupKind
    layers: tuple[int, ...]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor | None = None
    state_read: torch.Tensor | None = None
    state_write: torch.Tensor | None = None


class GroupTable(NamedTuple):
    """A group's table on the host: ids [B, C], and what they count. is_needed: whether missing blocks are faults."""

    number: int
    group: CacheGroup
    blocks: torch.Tensor
    granularity: Granularity
    is_needed: bool = True

    @property
    def ids_per_block(self) -> int:
        return self.group.ratio if self.granularity is Granularity.KERNEL else 1

    @property
    def tokens_per_entry(self) -> int:
        return self.group.block_size // self.ids_per_block


class Rows(NamedTuple):
    """Lengths of a pass of B rows and T tokens, on the host. prior: [B] tokens in the cache; query: [B] new ones, and
    query_start: [B+1] their offsets. row: 0 .. B-1; row_of_token and token: [T] row of each new token and its number in
    there."""

    prior: Int64
    query: Int64
    query_start: Offsets
    row: Int64
    row_of_token: Int64
    token: Int32

    @staticmethod
    def of(prior: npt.NDArray[np.integer], query_start: Offsets) -> Rows:
        wide = prior.astype(np.int64)
        row, query = upto(wide.size), (query_start[1:] - query_start[:-1]).astype(np.int64)
        if query_start[-1] == wide.size:
            return Rows(wide, query, query_start, row, row, wide.astype(np.int32))
        token = (wide - query_start[:-1]).astype(np.int32).repeat(query)
        token += upto(token.size)
        return Rows(wide, query, query_start, row, row.repeat(query), token)

    @property
    def last(self) -> Int64:
        """[B] number of each row's last new token."""
        return self.prior + self.query - 1


_UPTO = [np.arange(1024)]


def upto(count: int) -> Int64:
    """0 .. count-1; nobody writes to it."""
    if count > _UPTO[0].size:
        _UPTO[0] = np.arange(2 * count)
    return _UPTO[0][:count]


def values_of(tables: Sequence[GroupTable], rows: Rows, *, strict: bool) -> tuple[GroupValues, ...]:
    """Of every group. Raises `BlockFaultError` where `strict` and a needed block is missing or out of range."""
    results, faults = [], []
    states = iter(_states_of([table for table in tables if table.group.kind is GroupKind.STATE], rows))
    for table in tables:
        number, group, blocks, _, is_needed = table
        if group.kind is GroupKind.STATE:
            read, write = next(states)
            missing = ((write < 0) | ((rows.prior > 0) & (read < 0))) if min(read.min(), write.min()) < 0 else None
            pair = torch.from_numpy(read), torch.from_numpy(write)
            results.append(GroupValues(number, group.kind, group.layers, blocks, None, *pair))
        else:
            slot = slots_at(table, rows.row_of_token, rows.token)
            missing = slot < 0 if slot.min() < 0 else None
            results.append(GroupValues(number, group.kind, group.layers, blocks, torch.from_numpy(slot)))
        if missing is not None and missing.any() and is_needed:
            faults.append(f"{int(missing.sum())} in {group.name!r}")
    if faults and strict:
        raise BlockFaultError(
            "block tables", f"entries missing or out of range: {'; '.join(faults)}", "a block for every new token"
        )
    return tuple(results)


def _states_of(tables: Sequence[GroupTable], rows: Rows) -> Int32:
    """[groups, 2, B] physical blocks that states are read from and written to; -1 for none. Places are found once for
    all tables of the same shape and block size, and looked at together."""
    out = np.empty((len(tables), 2, rows.row.size), dtype=np.int32)
    if not tables:
        return out
    places: dict[tuple[int, int, int], tuple[Int64, npt.NDArray[np.bool_] | None]] = {}
    absent = []
    for found, table in zip(out, tables, strict=True):
        blocks, ids = table.blocks.numpy(), table.ids_per_block
        key = (blocks.shape[1], table.group.block_size, ids)
        if key not in places:
            places[key] = _state_places(rows, *key)
        at, outside = places[key]
        blocks.take(at, out=found, mode="clip")
        if ids > 1:
            found //= ids  # -1 stays -1
        absent.append(outside)
    lowest, highest = out.min(), out.max()
    for found, table, outside in zip(out, tables, absent, strict=True):
        first, end = table.group.first_block, table.group.num_blocks
        if lowest < first or highest >= end:
            found[(found < first) | (found >= end)] = -1
        if outside is not None:
            found[outside] = -1
    return out


def _state_places(rows: Rows, columns: int, size: int, ids: int) -> tuple[Int64, npt.NDArray[np.bool_] | None]:
    """[2, B] flat indices, in a table of so many columns, of the blocks of the last token in the cache and of the last
    new one; and which of them are outside of the table."""
    at = np.empty((2, rows.row.size), dtype=np.int64)
    np.subtract(rows.prior, 1, out=at[0])
    at[1] = rows.last
    at //= size
    if ids > 1:
        at *= ids
    outside = None
    if at.view(np.uint64).max() >= columns:  # as unsigned numbers, negative ones are beyond it too
        outside = (at < 0) | (at >= columns)
        at[outside] = 0
    at += rows.row * columns
    return at, outside


def slots_at(table: GroupTable, row: Int64, token: Int32) -> Int64:
    """[T] int64 slots of tokens (`token`: number within the row); -1 for none."""
    size = np.int32(table.tokens_per_entry)
    column = token // size  # in 32 bits: it is several times as fast, and no context is that long
    block = _ids_at(table, row, column)
    slot = block.astype(np.int64)
    slot -= column
    slot *= size
    slot += token
    if block.min() < 0:
        slot[block < 0] = -1
    return slot


def _ids_at(table: GroupTable, row: Int64, column: Int64 | Int32) -> Int32:
    """Entries at (row, column); -1 where the column is outside of the table or the id is no block of the pool."""
    blocks, ids = table.blocks.numpy(), table.ids_per_block
    columns = blocks.shape[1]
    outside = None
    unsigned = np.uint32 if column.dtype == np.int32 else np.uint64
    if column.view(unsigned).max() >= columns:  # as unsigned numbers, negative ones are beyond it too
        outside = (column < 0) | (column >= columns)
        column = column.copy()
        column[outside] = 0
    entry: Int32 = blocks.take(row * columns + column)
    if outside is not None:
        entry[outside] = -1
    first, end = table.group.first_block * ids, table.group.num_blocks * ids
    if entry.min() < first or entry.max() >= end:
        entry[(entry < first) | (entry >= end)] = -1
    return entry


def from_plan(plan: Plan, numbers: Sequence[int], tables: Sequence[torch.Tensor]) -> tuple[GroupValues, ...]:
    """The same values out of a plan; `numbers`, `tables`: the host's number and table of each group of the plan."""
    results = []
    for number, blocks, group_plan in zip(numbers, tables, plan.groups, strict=True):
        group = group_plan.group
        if isinstance(group_plan, PagedPlan):
            results.append(GroupValues(number, group.kind, group.layers, blocks, group_plan.slot))
        else:
            read, write = group_plan.state_read, group_plan.state_write
            results.append(GroupValues(number, group.kind, group.layers, blocks, None, read, write))
    return tuple(results)
