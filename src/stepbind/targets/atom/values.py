"""What the layers of each group read: slots of tokens, and slots that states are read from and written to.

`values_of` computes them on the CPU with few array operations, all groups together where they can be; the values are
those of the plan (`from_plan`), which is what a GPU uses, and tests hold one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stepbind.errors import BlockFaultError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.plan.plan import PagedPlan, Plan
from stepbind.step import Granularity
from stepbind.targets.atom.read import Numbers, Offsets

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GroupValues:
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


@dataclass(frozen=True, eq=False)
class GroupTable:
    """A group's table on the host: ids [B, C], and what they count."""

    number: int
    group: CacheGroup
    blocks: torch.Tensor
    granularity: Granularity

    @property
    def ids_per_block(self) -> int:
        return self.group.ratio if self.granularity is Granularity.KERNEL else 1


@dataclass(frozen=True, eq=False)
class Rows:
    """Lengths of a pass, on the host: prior [B] tokens in the cache, query_start [B+1] offsets of the new ones."""

    prior: Numbers
    query_start: Offsets

    @property
    def is_decode(self) -> bool:
        """One new token in every row."""
        return int(self.query_start[-1]) == self.prior.size


def values_of(tables: Sequence[GroupTable], rows: Rows, *, strict: bool) -> tuple[GroupValues, ...]:
    """Of every group. Raises `BlockFaultError` where `strict` and a needed block is missing or out of range."""
    last = rows.prior.astype(np.int64)
    token = last
    row: Int64 | None = None
    if not rows.is_decode:
        query = np.diff(rows.query_start)
        row = np.repeat(np.arange(query.size), query)
        token = last[row] + np.arange(row.size) - rows.query_start[row]
        last = last + query - 1
    results, faults = [], []
    columns: dict[int, tuple[Int64, Int64]] = {}
    for table in tables:
        if table.group.kind is GroupKind.STATE:
            size = table.group.block_size
            if size not in columns:
                columns[size] = (rows.prior - 1) // size, last // size
            values, bad = _state_values(table, rows, *columns[size])
        else:
            values, bad = _paged_values(table, row, token)
        results.append(values)
        if bad:
            faults.append(f"{bad} in {table.group.name!r}")
    if faults and strict:
        raise BlockFaultError(
            "block tables", f"entries missing or out of range: {'; '.join(faults)}", "a block for every new token"
        )
    return tuple(results)


def _state_values(table: GroupTable, rows: Rows, read: Int64, write: Int64) -> tuple[GroupValues, int]:
    read_slot = look_up(table, None, read)
    write_slot = look_up(table, None, write)
    bad = 0
    if write_slot.min() < 0 or read_slot.min() < 0:
        bad = int(((write_slot < 0) | ((rows.prior > 0) & (read_slot < 0))).sum())
    values = GroupValues(
        table.number,
        table.group.kind,
        table.group.layers,
        table.blocks,
        state_read=torch.from_numpy(read_slot),
        state_write=torch.from_numpy(write_slot),
    )
    return values, bad


def _paged_values(table: GroupTable, row: Int64 | None, token: Int64) -> tuple[GroupValues, int]:
    slot = slots(table, row, token)
    bad = int((slot < 0).sum()) if slot.min() < 0 else 0
    values = GroupValues(
        table.number, table.group.kind, table.group.layers, table.blocks, slot_mapping=torch.from_numpy(slot)
    )
    return values, bad


def slots(table: GroupTable, row: Int64 | None, token: Int64) -> Int64:
    """[T] int64 slots of tokens (`token`: number within its row; row None: one token a row), -1 for none."""
    size = table.group.block_size
    column, offset = np.divmod(token, size)
    if table.ids_per_block > 1:
        kernel = table.group.kernel_block_size
        column = column * table.ids_per_block + offset // kernel
        block = look_up_ids(table, row, column, table.ids_per_block).astype(np.int64)
        slot = block * kernel + token % kernel
    else:
        block = look_up_ids(table, row, column, 1).astype(np.int64)
        slot = block * size + offset
    if block.min() < 0:
        slot[block < 0] = -1
    return slot


def look_up(table: GroupTable, row: Int64 | None, column: Int64) -> Numbers:
    """Physical blocks at (row, column), column in physical blocks; -1 for none."""
    ids = table.ids_per_block
    if ids == 1:
        return look_up_ids(table, row, column, 1)
    entry = look_up_ids(table, row, column * ids, ids)
    return np.where(entry >= 0, entry // ids, -1)


def look_up_ids(table: GroupTable, row: Int64 | None, column: Int64, ids_per_block: int) -> Numbers:
    """Entries at (row, column); -1 where the column is outside of the table or the id is no block of the pool."""
    blocks = table.blocks.numpy()
    rows, columns = blocks.shape
    if row is None:
        row = np.arange(rows)
    if column.min() < 0 or column.max() >= columns:
        inside = (column >= 0) & (column < columns)
        entry = blocks[row, np.where(inside, column, 0)]
        entry[~inside] = -1
    else:
        entry = blocks[row, column]
    first, end = table.group.first_block * ids_per_block, table.group.num_blocks * ids_per_block
    if entry.min() < first or entry.max() >= end:
        entry[(entry < first) | (entry >= end)] = -1
    return entry


def from_plan(plan: Plan, numbers: Sequence[int], tables: Sequence[torch.Tensor]) -> tuple[GroupValues, ...]:
    """The same values out of a plan; `numbers`, `tables`: the host's number and table of each group of the plan."""
    results = []
    for number, blocks, group_plan in zip(numbers, tables, plan.groups, strict=True):
        group = group_plan.group
        if isinstance(group_plan, PagedPlan):
            results.append(GroupValues(number, group.kind, group.layers, blocks, slot_mapping=group_plan.slot))
        else:
            read, write = group_plan.state_read, group_plan.state_write
            results.append(GroupValues(number, group.kind, group.layers, blocks, state_read=read, state_write=write))
    return tuple(results)
