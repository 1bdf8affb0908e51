"""What all groups of a pass share, on the CPU (`on_host`) or out of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stepbind.plan.plan import CONV_CHUNK, Plan
from stepbind.targets.atom.read import Offsets


@dataclass(frozen=True, eq=False)
class SharedValues:
    """B rows, T tokens. query_start: [B+1] int32 or int64. row_of_token, span_start, span_end: [T] int32."""

    query_start: torch.Tensor
    row_of_token: torch.Tensor
    span_start: torch.Tensor | None  # prefill
    span_end: torch.Tensor | None


_UPTO = torch.arange(1024, dtype=torch.int32)


def upto(count: int) -> torch.Tensor:
    """0 .. count-1, int32 on the CPU; nobody writes to it."""
    global _UPTO
    if count > _UPTO.shape[0]:
        _UPTO = torch.arange(2 * count, dtype=torch.int32)
    return _UPTO[:count]


def on_host(query_start: Offsets, is_prefill: bool) -> SharedValues:
    rows, tokens = query_start.size - 1, int(query_start[-1])
    query = torch.from_numpy(query_start)
    if tokens == rows:
        row_of_token = upto(rows)
        start = row_of_token
    else:
        lengths = np.diff(query_start)
        row_of_token = torch.from_numpy(np.repeat(np.arange(rows, dtype=np.int32), lengths))
        start = row_of_token
        if is_prefill:
            start = torch.from_numpy(np.repeat(query_start[:-1].astype(np.int32), lengths))
    if not is_prefill:
        return SharedValues(query, row_of_token, None, None)
    return SharedValues(query, row_of_token, start, upto(tokens + 1)[1:])


def of_plan(plan: Plan, is_prefill: bool, dtype: torch.dtype) -> SharedValues:
    """`dtype`: of the offsets."""
    shared = plan.shared
    spans = (shared.span_start, shared.span_end) if is_prefill else (None, None)
    return SharedValues(shared.query_start.to(dtype), shared.row_of_token, *spans)


def conv_programs(query_start: Offsets, device: torch.device) -> tuple[dict[int, Any], torch.Tensor, torch.Tensor]:
    """Which row and which chunk of 8 tokens each program of ATOM's varlen convolution has (seed behaviour 10): counts
    by chunk size, and the two lists [max(1024, programs) * 2] int32 on the device, -1 behind the last program."""
    counts = -(-np.diff(query_start) // CONV_CHUNK)  # of the offsets' dtype, as the reference has it
    total = int(counts.sum())
    row = np.repeat(np.arange(counts.size), counts)
    chunk = (np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.int32)
    lists = np.full((2, 2 * max(1024, total)), -1, dtype=np.int32)
    lists[0, :total] = row
    lists[1, :total] = chunk
    both = torch.from_numpy(lists)
    if device.type != "cpu":
        both = both.pin_memory().to(device, non_blocking=True)
    batch, offset = both.unbind(0)
    programs = {
        "nums": torch.from_numpy(counts),
        "tot": total,
        "mlist": torch.from_numpy(row),
        "mlist_len": total,
        "offsetlist": torch.from_numpy(chunk),
        "batch_ptr": batch,
        "token_chunk_offset_ptr": offset,
    }
    return {CONV_CHUNK: programs}, batch, offset
