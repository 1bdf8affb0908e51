"""The usual passes in as few array operations as can be: what a serving engine binds thousands of times.

They have their values on the host, every block in its place, and positions that count tokens; hybrids have tables in
physical blocks. Whatever is otherwise goes the general way (`passes.compute_on_host`), which says what is wrong; tests
hold the two together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from stepbind.groups import CacheGroup, GroupKind
from stepbind.step import INT32_MAX
from stepbind.targets.atom.computed import Computed
from stepbind.targets.atom.groups import AtomGroups
from stepbind.targets.atom.metadata import Profile
from stepbind.targets.atom.read import AtomPass, numbers, one_each, prefix_of, query_start_of
from stepbind.targets.atom.shared import SharedValues, upto
from stepbind.targets.atom.tables import first_table, group_table
from stepbind.targets.atom.values import GroupValues, Int32, Int64, highest, lowest


def usual_pass(host: AtomPass, positions: torch.Tensor, profile: Profile, groups: AtomGroups) -> Computed | None:
    """None for a pass that is not usual."""
    if groups.first_paged is None or host.graph_flag:
        return None
    return (_prefill if host.is_prefill else _decode)(host, positions, profile, groups)


def _decode(host: AtomPass, positions: torch.Tensor, profile: Profile, groups: AtomGroups) -> Computed | None:
    """One token a row, by the plus-one field."""
    rows, context = host.num_rows, numbers(host.plus_one)
    if context is None or positions.numel() != rows:
        return None
    token = context - 1
    if not _are(positions, token) or (host.sequence_len is not None and not _are(host.sequence_len, token)):
        return None
    start = numbers(host.query_start if host.query_start_device is None else host.query_start_device)
    if lowest(token) < 0 or (start is not None and start[-1] > 0):
        return None
    wide = token.astype(np.int64)
    longest = highest(context)
    found = _found(host, profile, groups, longest, None, token, wide, wide)
    if found is None:
        return None
    return Computed(
        is_dummy=False,
        num_tokens=rows,
        shared=SharedValues(_one_each(rows), _rows(rows) if profile.sparse_fields else None, None, None),
        query_start_host=one_each(rows),
        seq_lens=host.plus_one,  # type: ignore[arg-type]  # it has numbers
        max_query=1,
        max_context=longest,
        total_context=int(wide.sum()) + rows,
        has_prior=None,
        block_table=found.block_table,
        slot_mapping=found.slot_mapping,
        groups=found.groups,
        state_read=found.state_read,
        state_write=found.state_write,
    )


def _prefill(host: AtomPass, positions: torch.Tensor, profile: Profile, groups: AtomGroups) -> Computed | None:
    """At least one token a row, by prefix and input lengths."""
    rows, tokens = host.num_rows, positions.numel()
    prior, new, start = numbers(prefix_of(host, device_first=True)), numbers(host.input_len), query_start_of(host)
    if prior is None or new is None or start.size != rows + 1 or start[-1] != tokens:
        return None
    if (profile.prefill_context_is_plus_one and host.plus_one is not None) or lowest(prior) < 0:
        return None
    if host.prefix_len is not None and not _are(host.prefix_len, prior):
        return None
    query = start[1:] - start[:-1]
    if lowest(query) <= 0:
        return None
    count = upto(tokens + 1)
    token = (prior - start[:-1]).astype(np.int32).repeat(query)
    token += count.numpy()[:-1]
    if not _are(positions, token):
        return None
    row = _rows(rows).numpy().repeat(query)
    wide = prior.astype(np.int64)
    last = wide + query
    last -= 1
    context = prior + new
    longest = highest(context)
    found = _found(host, profile, groups, longest, row, token, wide, last)
    if found is None:
        return None
    shared = SharedValues(torch.from_numpy(start), None, None, None)
    if profile.sparse_fields:
        spans = torch.from_numpy(start[:-1].astype(np.int32).repeat(query)), count[1:]
        shared = SharedValues(shared.query_start, torch.from_numpy(row), *spans)
    return Computed(
        is_dummy=False,
        num_tokens=tokens,
        shared=shared,
        query_start_host=start,
        seq_lens=torch.from_numpy(context),
        max_query=highest(query),
        max_context=longest,
        total_context=int(context.sum()),
        has_prior=torch.from_numpy(prior > 0) if groups.state_groups else None,
        block_table=found.block_table,
        slot_mapping=found.slot_mapping,
        groups=found.groups,
        state_read=found.state_read,
        state_write=found.state_write,
    )


class _Found(NamedTuple):
    """What the tables of a pass hold. groups: values of each. The others: fields of the first group."""

    groups: tuple[GroupValues, ...]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    state_read: torch.Tensor | None
    state_write: torch.Tensor | None


_NO_STATES: tuple[torch.Tensor, ...] = ()


def _found(
    host: AtomPass,
    profile: Profile,
    groups: AtomGroups,
    longest: int,
    row: Int32 | None,
    token: Int32,
    prior: Int64,
    last: Int64,
) -> _Found | None:
    """longest: context of any row. row, token: [T] of each new token; row None: one token a row. prior: [B] tokens in
    the cache. last: [B] number of the last new token. None where a block is missing."""
    first = groups.first_paged
    assert first is not None
    ids = [1] * len(groups.sources)  # in a block
    if groups.has_kernel_blocks:
        given = [group_table(source, host, profile, longest) for source in groups.sources]
        tables, ids = [each.blocks for each in given], [each.ids_per_block for each in given]
        if groups.state_groups and max(ids) > 1:
            return None
        block_table = first_table(host, profile, groups, longest)
    else:
        tables = [host.tables[source.table] for source in groups.sources]
        if profile.physical_table and host.store is not None:
            tables = [host.store if s.table == 0 else table for s, table in zip(groups.sources, tables, strict=True)]
        block_table = tables[first]
    arrays = [table.numpy() for table in tables]
    blocks, states = None, _NO_STATES
    if groups.state_groups:
        blocks = _blocks_of_states(arrays, groups, prior, last)
        if blocks is None:
            return None
        states = torch.from_numpy(blocks).unbind()  # [groups * 2] of [B]
    slot: Int64 | None
    values = []
    for index, (source, table) in enumerate(zip(groups.sources, tables, strict=True)):
        number, group = source.table, source.group
        if group.kind is GroupKind.STATE:
            read, write = states[2 * index], states[2 * index + 1]
            values.append(GroupValues(number, group.kind, group.layers, table, None, read, write))
            continue
        if row is None and blocks is not None:
            slot = blocks[2 * index + 1].astype(np.int64) * group.block_size
            slot += token % group.block_size
        else:
            slot = _slots(arrays[index], group, ids[index], row, token)
            if slot is None:
                return None
        values.append(GroupValues(number, group.kind, group.layers, table, torch.from_numpy(slot)))
    slot_mapping = values[first].slot_mapping
    assert slot_mapping is not None
    pair = (states[2 * first], states[2 * first + 1]) if states else (None, None)
    return _Found(tuple(values), block_table, slot_mapping, *pair)


def _blocks_of_states(tables: list[Int32], groups: AtomGroups, prior: Int64, last: Int64) -> Int32 | None:
    """[groups * 2, B] blocks: for each table that of the last token in the cache (-1 where there is none) and that of
    the last new one. Places are found once for all tables of the same shape and block size."""
    rows = last.size
    blocks = np.empty((2 * len(tables), rows), dtype=np.int32)
    tokens = np.empty((2, rows), dtype=np.int64)
    np.subtract(prior, 1, out=tokens[0])
    tokens[1] = last
    fresh = None
    if lowest(prior) == 0:
        fresh = prior == 0
        tokens[0][fresh] = last[fresh]
    places: dict[tuple[int, int], Int64] = {}
    for index, (source, table) in enumerate(zip(groups.sources, tables, strict=True)):
        columns, size = table.shape[1], source.group.block_size
        at = places.get((columns, size))
        if at is None:
            at = tokens // size
            if highest(at) >= columns:
                return None
            at += _row_starts(rows, columns)
            places[columns, size] = at
        table.take(at, out=blocks[2 * index : 2 * index + 2], mode="clip")
    if lowest(blocks) <= 0 or highest(blocks) >= groups.fewest_blocks:
        return None
    if fresh is not None:
        blocks[::2, fresh] = -1
    return blocks


def _slots(table: Int32, group: CacheGroup, ids: int, row: Int32 | None, token: Int32) -> Int64 | None:
    """[T] slots of tokens by a table of `ids` ids a block, in 32 bits while that is enough: it is several times as
    fast."""
    columns, size, num_blocks = table.shape[1], group.block_size // ids, group.num_blocks * ids
    column = token // size
    if highest(column) >= columns or max(num_blocks * size, table.size) > INT32_MAX:
        return None
    at = (_rows(token.size).numpy() if row is None else row) * columns
    at += column
    slot: Int32 = table.take(at)
    if lowest(slot) < group.first_block * ids or highest(slot) >= num_blocks:
        return None
    slot -= column
    slot *= size
    slot += token
    return slot.astype(np.int64)


def _are(tensor: torch.Tensor, values: Int32) -> bool:
    """Whether a tensor on the host has these values, as int32 or int64."""
    array = tensor.numpy()
    if array.dtype != np.int32:
        return array.dtype == np.int64 and array.shape == values.shape and bool((array == values).all())
    return array.tobytes() == values.tobytes()


@lru_cache(maxsize=1024)
def _rows(rows: int) -> torch.Tensor:
    """0 .. B-1, int32; nobody writes to it."""
    return upto(rows)


@lru_cache(maxsize=1024)
def _row_starts(rows: int, columns: int) -> Int64:
    """Flat index of each row's first entry; nobody writes to it."""
    return np.arange(rows) * columns


@lru_cache(maxsize=1024)
def _one_each(rows: int) -> torch.Tensor:
    return torch.from_numpy(one_each(rows))
