"""What a usual pass finds in its tables: blocks, slots, and states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from stepbind.groups import GroupKind
from stepbind.step import INT32_MAX
from stepbind.targets.atom.computed import States, StateSlots
from stepbind.targets.atom.groups import AtomGroups
from stepbind.targets.atom.metadata import Profile
from stepbind.targets.atom.read import read
from stepbind.targets.atom.shared import upto32
from stepbind.targets.atom.tables import first_table, group_table
from stepbind.targets.atom.usual_inputs import UsualInputs
from stepbind.targets.atom.values import GroupValues, Int32, Int64, highest, lowest, upto

INT32 = np.dtype(np.int32)
ONE = np.array(1, dtype=np.int32)


class UsualTables(NamedTuple):
    """first: the first group's, as the reference's field has it. Of each of `AtomGroups.sources`: own [B, C], the same
    as an array, and the tokens of an entry. An entry is good from `lowest` on and below `end`, in all of them."""

    first: torch.Tensor
    own: list[torch.Tensor]
    arrays: list[Int32]
    sizes: tuple[int, ...]
    lowest: int
    end: int


def usual_tables(
    given: UsualInputs, inputs: Any, profile: Profile, groups: AtomGroups, rows: int, longest: int
) -> UsualTables | None:
    sources, sizes, least, end = groups.sources, groups.sizes, 1, groups.fewest_blocks
    if groups.has_kernel_blocks:
        host = read(inputs)
        chosen = [group_table(source, host, profile, longest) for source in sources]
        ids = [table.ids_per_block for table in chosen]
        if groups.state_groups and max(ids) > 1:
            return None
        own, first = [table.blocks for table in chosen], first_table(host, profile, groups, longest)
        sizes, least = tuple([table.tokens_per_entry for table in chosen]), max(ids)
        end = min([source.group.num_blocks * each for source, each in zip(sources, ids, strict=True)])
        arrays = [table.numpy() for table in own]
    elif not given.is_store_alike:
        return None
    else:
        own, first = [given.tables[source.table] for source in sources], given.tables[0]
        arrays = [given.table_arrays[source.table] for source in sources]
    for array in arrays:
        shape = array.shape
        if len(shape) != 2 or shape[0] != rows or array.dtype != INT32 or not array.flags.c_contiguous:
            return None
    return UsualTables(first, own, arrays, sizes, least, end)


def blocks_at(tables: UsualTables, tokens: Int64, longest: int) -> Int32 | None:
    """[groups, n, B] entries of the tables for `tokens`, n of each row, the last of which is `longest` - 1. None where
    one is missing. Places are found once for all tables of the same columns and size."""
    count, rows = tokens.shape
    blocks = np.empty((len(tables.arrays), count, rows), dtype=np.int32)
    places: dict[tuple[int, int], Int64] = {}
    for out, table, size in zip(blocks, tables.arrays, tables.sizes, strict=True):
        columns = table.shape[1]
        at = places.get((columns, size))
        if at is None:
            if longest > columns * size:
                return None
            at = places[columns, size] = tokens // as_int64(size)
            at += _row_starts(rows, columns)
        table.take(at, out=out, mode="clip")
    if lowest(blocks) < tables.lowest or highest(blocks) >= tables.end:
        return None
    return blocks


def prefill_slots(
    tables: UsualTables, index: int, prior: Int32, end: Int32, begin: Int32, tokens: int, longest: int
) -> Int64 | None:
    """[T] slots of tokens `prior` .. `end` - 1 of each row, which begin at `begin` in the pass. Block by block: within
    one, slots count as tokens do. None where a block is missing."""
    table, size = tables.arrays[index], tables.sizes[index]
    rows, columns = table.shape
    if longest > columns * size or max(tables.end, tokens) * size > INT32_MAX:
        return None
    number = as_int32(size)
    column = prior // number  # of each row, its first one
    count = (end - ONE) // number
    count -= column
    count += ONE
    ends = np.add.accumulate(count, dtype=np.int32)
    behind = ends - count
    total = ends.item(-1)
    column -= behind
    at = (column + _row_starts(rows, columns)).repeat(count)
    at += upto32(total)
    block = table.take(at)
    if lowest(block) < tables.lowest or highest(block) >= tables.end:
        return None
    column *= number
    column -= prior
    column += begin
    edge = column.repeat(count)  # where in the pass each block's first slot would be
    edge += upto32(total) * number
    block *= number
    block -= edge
    edge[behind] = begin  # a row's first block is entered behind its first slot
    length = np.empty_like(edge)
    np.subtract(edge[1:], edge[:-1], out=length[:-1])
    length[-1] = tokens - edge.item(-1)
    slot = block.astype(np.int64).repeat(length)
    slot += upto(tokens)
    return slot


def states_of(blocks: Int32 | None, groups: AtomGroups, *, is_prefill: bool) -> States | None:
    """blocks: [groups, 2, B], of the last token in the cache and of the last new one."""
    if blocks is None or not groups.state_groups:
        return None
    index_of = groups.state_index
    return States(StateSlots(blocks, 0, index_of, is_prefill), StateSlots(blocks, 1, index_of, is_prefill))


class UsualGroups(Sequence[GroupValues]):
    """Values of each group, made when they are first looked at: ATOM's own layers read the metadata's fields."""

    def __init__(
        self, tables: UsualTables, groups: AtomGroups, slots: list[torch.Tensor], states: States | None
    ) -> None:
        self._of = tables, groups, slots, states

    @cached_property
    def _values(self) -> tuple[GroupValues, ...]:
        tables, groups, slots, states = self._of
        of_paged = dict(zip(groups.paged, slots, strict=True))
        values = []
        for index, (source, table) in enumerate(zip(groups.sources, tables.own, strict=True)):
            number, group = source.table, source.group
            values.append(GroupValues(number, group.kind, group.layers, table, of_paged.get(index)))
            if states is not None and group.kind is GroupKind.STATE:
                read, write = states.read.of(number), states.write.of(number)
                values[-1] = values[-1]._replace(state_read=read, state_write=write)
        return tuple(values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)


@lru_cache(maxsize=64)
def as_int64(value: int) -> Int64:
    return np.array(value)


@lru_cache(maxsize=64)
def as_int32(value: int) -> Int32:
    return np.array(value, dtype=np.int32)


@lru_cache(maxsize=1024)
def _row_starts(rows: int, columns: int) -> Int64:
    """Flat index of each row's first entry; nobody writes to it."""
    return np.arange(rows) * columns
