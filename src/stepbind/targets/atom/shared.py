"""What all groups of a pass share, on the CPU (`on_host`) or out of a plan."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from stepbind.plan.plan import CONV_CHUNK, Plan
from stepbind.targets.atom.native import native
from stepbind.targets.atom.read import Offsets
from stepbind.targets.atom.values import Int32, Int64, Rows
from stepbind.targets.atom.values import upto as upto64


class SharedValues(NamedTuple):
    """B rows, T tokens. query_start: [B+1] int32 or int64. row_of_token, span_start, span_end: [T] int32, the last two
    in prefill alone; none of the three where nobody reads them. conv_row, conv_chunk: the lists of `conv_programs`, in
    plans of prefills with Gated DeltaNet."""

    query_start: torch.Tensor
    row_of_token: torch.Tensor | None
    span_start: torch.Tensor | None
    span_end: torch.Tensor | None
    conv_row: torch.Tensor | None = None
    conv_chunk: torch.Tensor | None = None


_UPTO = [np.arange(1024, dtype=np.int32)]


def upto32(count: int) -> Int32:
    """0 .. count-1; nobody writes to it."""
    if count > _UPTO[0].size:
        _UPTO[0] = np.arange(2 * count, dtype=np.int32)
    return _UPTO[0][:count]


def upto(count: int) -> torch.Tensor:
    """0 .. count-1, int32 on the CPU; nobody writes to it."""
    return torch.from_numpy(upto32(count))


def on_host(rows: Rows, is_prefill: bool, with_tokens: bool) -> SharedValues:
    """`with_tokens`: what there is one of for each token too."""
    query_start = torch.from_numpy(rows.query_start)
    if not with_tokens:
        return SharedValues(query_start, None, None, None)
    row = torch.from_numpy(upto32(rows.row.size).repeat(rows.query))
    if not is_prefill:
        return SharedValues(query_start, row, None, None)
    start = torch.from_numpy(rows.query_start[:-1].astype(np.int32).repeat(rows.query))
    return SharedValues(query_start, row, start, upto(row.shape[0] + 1)[1:])


def of_plan(plan: Plan, is_prefill: bool, dtype: torch.dtype, with_tokens: bool, with_lists: bool) -> SharedValues:
    """`dtype`: of the offsets. with_tokens: what there is one of for each token too. with_lists: those of
    `conv_programs`."""
    shared, row_of_token = plan.shared, plan.shared.row_of_token if with_tokens else None
    if not is_prefill:
        rows, device = plan.sizes.padded_rows, shared.query_start.device
        return SharedValues(_one_each(rows, dtype, device), row_of_token, None, None)
    spans = (shared.span_start, shared.span_end) if with_tokens else (None, None)
    lists = (shared.conv_chunk_row, shared.conv_chunk_index) if with_lists else (None, None)
    return SharedValues(shared.query_start.to(dtype), row_of_token, *spans, *lists)


@lru_cache(maxsize=1024)
def _one_each(rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Offsets of rows of one token; nobody writes to them."""
    return torch.arange(rows + 1, dtype=dtype, device=device)


Programs = tuple[dict[int, Any], torch.Tensor, torch.Tensor]
"""Counts by chunk size, and the two lists."""
LEAST_PROGRAMS = 1024


def conv_programs(query_start: Offsets, shared: SharedValues) -> Programs:
    """Which row and which chunk of 8 tokens each program of ATOM's varlen convolution has (seed behaviour 10): counts
    by chunk size, and the two lists [max(1024, programs) * 2] int32 on the device, -1 behind the last program. Lists
    that the plan does not have are copied there, which waits."""
    device, is_planned = shared.query_start.device, shared.conv_row is not None
    if native is not None:
        total, nums, rows, chunk, batch, offset = native.conv_programs(
            query_start, CONV_CHUNK, LEAST_PROGRAMS, not is_planned
        )
    else:
        counts, row, lists = conv_lists(query_start)
        total, nums, rows = row.size, torch.from_numpy(counts), torch.from_numpy(row)
        chunk = torch.from_numpy(lists[1, :total])
        batch, offset = torch.from_numpy(lists).unbind(0)
    if shared.conv_row is not None and shared.conv_chunk is not None:
        batch, offset = shared.conv_row, shared.conv_chunk
    else:
        batch, offset = batch.to(device), offset.to(device)
    programs = {
        "nums": nums,
        "tot": total,
        "mlist": rows,
        "mlist_len": total,
        "offsetlist": chunk,
        "batch_ptr": batch,
        "token_chunk_offset_ptr": offset,
    }
    return {CONV_CHUNK: programs}, batch, offset


def conv_lists(query_start: Offsets) -> tuple[Offsets, Int64, Int32]:
    """Programs of each row, the row of each program, and the two lists."""
    counts = query_start[1:] - query_start[:-1]  # of the offsets' dtype
    counts += CONV_CHUNK - 1
    counts //= CONV_CHUNK
    end = counts.cumsum()
    total = end.item(-1)
    row = upto64(counts.size).repeat(counts)
    lists = np.empty((2, 2 * max(LEAST_PROGRAMS, total)), dtype=np.int32)
    lists[:, total:] = -1
    lists[0, :total] = row
    chunk = lists[1, :total]
    chunk[:] = upto32(total)
    if counts.size > 1:
        chunk -= (end - counts).astype(np.int32).repeat(counts)
    return counts, row, lists
