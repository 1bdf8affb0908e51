"""The usual decode pass in as few array operations as can be: what a serving engine binds thousands of times.

It is one token a row, the plus-one field, every block in its place, and blocks that are kernel blocks too. Whatever is
otherwise goes the general way (`passes.compute_on_host`), which says what is wrong; tests hold the two together.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from stepbind.groups import GroupKind
from stepbind.targets.atom.computed import Computed
from stepbind.targets.atom.groups import AtomGroups
from stepbind.targets.atom.metadata import Profile
from stepbind.targets.atom.read import AtomPass, numbers, one_each
from stepbind.targets.atom.shared import SharedValues, upto
from stepbind.targets.atom.values import GroupValues

Int64 = npt.NDArray[np.int64]
_BEHIND = np.array([[2], [1]])
"""Context length to the number of the last token in the cache, and of the new one."""


def usual_decode(host: AtomPass, positions: torch.Tensor, profile: Profile, groups: AtomGroups) -> Computed | None:
    """None for any other pass."""
    rows, plus_one = host.num_rows, host.plus_one
    if plus_one is None or positions.numel() != rows or groups.has_kernel_blocks or host.graph_flag:
        return None
    if plus_one.dtype != torch.int32 or positions.dtype != torch.int32:
        return None
    start = numbers(host.query_start_device)
    if start is not None and start[-1] > 0:
        return None
    tables = [host.tables[source.table] for source in groups.sources]
    if profile.physical_table and host.store is not None and groups.sources[0].table == 0:
        tables[0] = host.store
    context = plus_one.numpy()
    tokens = context - _BEHIND  # [2, B] int64
    if positions.numpy().tobytes() != (context - 1).tobytes():
        return None
    blocks = _look_up(tokens, tables, groups)
    if blocks is None:
        return None
    values, first = _values(tokens[1], tables, groups, blocks)
    slot_mapping = None if first is None else values[first].slot_mapping
    if first is None or slot_mapping is None:
        return None
    has_states = bool(groups.state_groups)
    return Computed(
        is_dummy=False,
        num_tokens=rows,
        shared=SharedValues(_start(rows), upto(rows) if profile.sparse_fields else None, None, None),
        query_start_host=one_each(rows),
        seq_lens=plus_one,
        max_query=1,
        max_context=int(context.max()),
        total_context=int(context.sum()),
        block_table=tables[first],
        slot_mapping=slot_mapping,
        groups=tuple(values),
        state_read=torch.from_numpy(blocks[first, 0]) if has_states else None,
        state_write=torch.from_numpy(blocks[first, 1]) if has_states else None,
    )


def _look_up(tokens: Int64, tables: list[torch.Tensor], groups: AtomGroups) -> npt.NDArray[np.int32] | None:
    """[groups, 2, B] blocks of the tokens in each table; None where one is missing."""
    blocks = np.empty((len(tables), *tokens.shape), dtype=np.int32)
    found: dict[tuple[int, int], Int64] = {}
    for out, source, table in zip(blocks, groups.sources, tables, strict=True):
        columns, size = table.shape[1], source.group.block_size
        at = found.get((columns, size))
        if at is None:
            at = tokens // size
            if at.view(np.uint64).max() >= columns:  # as unsigned numbers, negative ones are beyond it too
                return None
            at += _row_starts(tokens.shape[1], columns)
            found[columns, size] = at
        table.numpy().take(at, out=out, mode="clip")
    if blocks.min() <= 0 or blocks.max() >= groups.fewest_blocks:
        return None
    return blocks


def _values(
    token: Int64, tables: list[torch.Tensor], groups: AtomGroups, blocks: npt.NDArray[np.int32]
) -> tuple[list[GroupValues], int | None]:
    """Values of each group, and which of them is the host's first one."""
    values, first = [], None
    for index, (source, table) in enumerate(zip(groups.sources, tables, strict=True)):
        group, number = source.group, source.table
        if number == 0 and first is None:
            first = index
        if group.kind is GroupKind.STATE:
            read, write = torch.from_numpy(blocks[index, 0]), torch.from_numpy(blocks[index, 1])
            values.append(GroupValues(number, group.kind, group.layers, table, None, read, write))
        else:
            slot = np.multiply(blocks[index, 1], group.block_size, dtype=np.int64)
            slot += token % group.block_size
            values.append(GroupValues(number, group.kind, group.layers, table, torch.from_numpy(slot)))
    return values, first


@lru_cache(maxsize=1024)
def _row_starts(rows: int, columns: int) -> Int64:
    """Flat index of each row's first entry; nobody writes to it."""
    return np.arange(rows) * columns


@lru_cache(maxsize=1024)
def _start(rows: int) -> torch.Tensor:
    return torch.from_numpy(one_each(rows))
