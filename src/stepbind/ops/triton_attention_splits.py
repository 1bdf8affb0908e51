"""How decode attention on the GPU splits a token's context over programs, and merges their partial results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepbind.ops import triton_pdl
from stepbind.ops.triton_pdl import wait_for_inputs
from stepbind.plan.plan import Shared

MAX_SPLITS = 64
TOKENS_PER_SPLIT = 8192
"""Context tokens that one program of decode walks through at most, where MAX_SPLITS allows."""
MERGED_AT_ONCE = 16


def num_splits(num_tokens: int, num_kv_heads: int, max_context: int, tile: int, programs: int) -> int:
    """Programs that share one token's context: as many as make `programs` in all, and more for long contexts. A power
    of 2."""
    wanted = max(programs // (num_tokens * num_kv_heads), -(-max_context // TOKENS_PER_SPLIT), 1)
    useful = max(1, min(wanted, -(-max_context // tile), MAX_SPLITS))
    return 1 << (useful.bit_length() - 1)


def merge_splits(
    out: torch.Tensor,
    partial: torch.Tensor,
    peak: torch.Tensor,
    weight: torch.Tensor,
    shared: Shared,
    table_columns: int,
    page: int,
    tile: int,
) -> None:
    """Means out [T, heads, D] of partial sums of values [T, heads, splits, D] with their peaks and weights [T, heads,
    splits] float32, as kernels leave them that take a context of at most table_columns * page tokens in tiles."""
    num_tokens, num_heads, splits, head_dim = partial.shape
    early = triton_pdl.launches_early(out.device)
    _merge_splits[(num_tokens, num_heads)](
        out,
        partial,
        peak,
        weight,
        shared.row_of_token,
        shared.query_start,
        shared.prior_len,
        table_columns,
        splits,
        head_dim,
        page,
        triton.next_power_of_2(head_dim),
        tile,
        MERGED_AT_ONCE,
        early,
        **triton_pdl.launch_options(early),
    )


@triton.jit
def context_of(token, row_of_token, query_start, prior_len, table_columns, PAGE):
    """Row of a token, and how many positions of its row it attends to: 0 for padding."""
    row = tl.load(row_of_token + token)
    live = row >= 0
    prior = tl.load(prior_len + row, mask=live, other=0)
    start = tl.load(query_start + row, mask=live, other=0)
    return row, tl.where(live, tl.minimum(prior + token - start + 1, table_columns * PAGE), 0)


@triton.jit
def positions_per_split(context, splits, TILE):
    return tl.cdiv(tl.cdiv(context, splits), TILE) * TILE


@triton.jit(do_not_specialize=["splits"])
def _merge_splits(
    out,
    partial,
    peaks,
    weights,
    row_of_token,
    query_start,
    prior_len,
    table_columns,
    splits,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, h): the result of token t and query head h from the parts of its context that have positions."""
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    _, context = context_of(tl.program_id(0), row_of_token, query_start, prior_len, table_columns, PAGE)
    used = tl.cdiv(context, tl.maximum(positions_per_split(context, splits, TILE), 1))
    dim = tl.arange(0, DIMS)
    acc = tl.zeros([DIMS], tl.float32)
    weight = 0.0
    peak = float("-inf")
    for first in range(0, used, PARTS):
        part = first + tl.arange(0, PARTS)
        part_peak = tl.load(peaks + at * splits + part, mask=part < used, other=float("-inf"))
        part_weight = tl.load(weights + at * splits + part, mask=part < used, other=0)
        inside = (part < used)[:, None] & (dim < HEAD_DIM)[None, :]
        value = tl.load(partial + (at * splits + part)[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0)
        higher = tl.maximum(peak, tl.max(part_peak, axis=0))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(part_peak - reference)
        shrink = tl.exp2(peak - reference)
        acc = acc * shrink + tl.sum(value * share[:, None], axis=0)
        weight = weight * shrink + tl.sum(part_weight * share, axis=0)
        peak = higher
    mean = acc / tl.where(weight > 0, weight, 1.0)
    tl.store(out + at * HEAD_DIM + dim, mean.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
