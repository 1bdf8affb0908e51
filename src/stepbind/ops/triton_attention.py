"""Attention over paged keys and values, on the GPU.

Softmax is taken over tiles of the context as they come, with a running maximum (Milakov and Gimelshein, "Online
normalizer calculation for softmax", arXiv 1805.02867; Dao et al., "FlashAttention", arXiv 2205.14135). Decode splits
each row's context over programs and merges their partial results in a second launch (Flash-Decoding).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from stepbind.caches import KVPages
from stepbind.ops import triton_pdl
from stepbind.ops.triton_attention_prefill import attend_rows
from stepbind.ops.triton_attention_splits import context_of, merge_splits, num_splits, positions_per_split
from stepbind.ops.triton_attention_tile import attend_tile, compute_dtype, shared_memory_bytes, tile_tokens
from stepbind.ops.triton_pdl import wait_for_inputs
from stepbind.plan.plan import PagedPlan, Shared, Sizes
from stepbind.step import Phase

PROGRAMS = 264
"""Programs that decode should have at least: two for each of an H200's 132 multiprocessors."""
STAGES = 5
"""Of decode's loop over 16-bit pages. Two go to the table's entries, so that 3 have one tile of keys and values under
way, and 5 have two, where two fit into the shared memory (75 KB at a head dim of 256)."""
SPARE_BYTES = 24 * 1024
"""Shared memory that the loop takes besides its tiles, at the most (18 KB at a head dim of 512)."""


def paged_attention(
    query: torch.Tensor,
    pages: KVPages,
    plan: PagedPlan,
    shared: Shared,
    sizes: Sizes,
    scale: float,
) -> torch.Tensor:
    """Arguments and result of `attention.paged_attention`. Launches depend on sizes alone; `sizes.max_context` and
    `sizes.max_query` may be upper bounds. A context is cut off at the width of `plan.block_table`."""
    if query.shape[0] == 0:
        return torch.empty_like(query)
    # Contiguous even where the query is a transposed view.
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    attend = attend_rows if sizes.phase is Phase.PREFILL else _attend_tokens
    attend(out, query, pages, plan, shared, sizes, scale * math.log2(math.e))
    return out


def _attend_tokens(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: KVPages,
    plan: PagedPlan,
    shared: Shared,
    sizes: Sizes,
    scale: float,
) -> None:
    """Every token on its own: decode, and verify with its few tokens a row."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, page = pages.key.shape[1], pages.key.shape[2]
    tile, dims = tile_tokens(head_dim), triton.next_power_of_2(head_dim)
    splits = num_splits(num_tokens, num_kv_heads, sizes.max_context, tile, PROGRAMS)
    target, peak, weight = out, out, out
    early = triton_pdl.launches_early(query.device)
    if splits > 1:
        target = query.new_empty((num_tokens, num_heads, splits, head_dim), dtype=torch.float32)
        peak = query.new_empty((num_tokens, num_heads, splits), dtype=torch.float32)
        weight = torch.empty_like(peak)
    _attend_split[(num_tokens, num_kv_heads, splits)](
        target,
        peak,
        weight,
        query,
        pages.key,
        pages.value,
        plan.block_table,
        shared.row_of_token,
        shared.query_start,
        shared.prior_len,
        scale,
        pages.key.shape[0],
        plan.block_table.shape[1],
        plan.block_table.stride(0),
        *query.stride(),
        *pages.key.stride(),
        *pages.value.stride(),
        num_heads // num_kv_heads,
        head_dim,
        page,
        max(16, triton.next_power_of_2(num_heads // num_kv_heads)),  # a matrix product has at least 16 rows
        dims,
        tile,
        splits > 1,
        compute_dtype(query, pages.key),
        early,
        num_warps=4,
        num_stages=_stages(query, pages, tile * dims),
        **triton_pdl.launch_options(early),
    )
    if splits > 1:
        merge_splits(out, target, peak, weight, shared, plan.block_table.shape[1], page, tile)


def _stages(query: torch.Tensor, pages: KVPages, elements: int) -> int:
    """Stages of decode's loop over tiles of so many elements of keys, and as many of values."""
    if query.element_size() != 2 or pages.key.element_size() != 2:
        return 1
    two_tiles = 2 * 2 * elements * pages.key.element_size()
    return STAGES if two_tiles + SPARE_BYTES <= shared_memory_bytes(query.device) else 3


@triton.jit
def _attend_split(
    out,
    out_peak,
    out_weight,
    query,
    key,
    value,
    table,
    row_of_token,
    query_start,
    prior_len,
    scale,
    num_blocks,
    table_columns,
    table_row,
    query_token,
    query_head,
    query_dim,
    key_block,
    key_head,
    key_token,
    key_dim,
    value_block,
    value_head,
    value_token,
    value_dim,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    COMPUTE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, h, s): the s-th part of token t's context, for the query heads of KV head h.

    out: [T, heads, D] where the context is not split; else [T, heads, splits, D] float32 sums of values, with their
    peaks and weights [T, heads, splits] beside them. Parts without positions are not written, the first always is.
    """
    wait_for_inputs(PDL)
    token, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    row, context = context_of(tl.program_id(0), row_of_token, query_start, prior_len, table_columns, PAGE)
    length = positions_per_split(context, splits, TILE)
    first = split * length
    if (split == 0) | (first < context):
        dim = tl.arange(0, DIMS)
        within = tl.arange(0, HEADS)
        head = kv_head * HEADS_PER_KV + within
        inside = (within < HEADS_PER_KV)[:, None] & (dim < HEAD_DIM)[None, :]
        q_at = token * query_token + head[:, None] * query_head + dim[None, :] * query_dim
        q = tl.load(query + q_at, mask=inside, other=0).to(COMPUTE)
        acc = tl.zeros([HEADS, DIMS], tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        peak = tl.full([HEADS], float("-inf"), tl.float32)
        last = tl.minimum(first + length, context)
        for start in range(first, last, TILE):
            position = start + tl.arange(0, TILE)
            column = row.to(tl.int64) * table_row + position // PAGE
            block = tl.load(table + column, mask=position < last, other=-1)
            readable = (block >= 0) & (block < num_blocks)
            key_at = block.to(tl.int64) * key_block + kv_head * key_head + (position % PAGE) * key_token
            value_at = block.to(tl.int64) * value_block + kv_head * value_head + (position % PAGE) * value_token
            acc, peak, weight = attend_tile(
                acc,
                peak,
                weight,
                q,
                readable[None, :],
                key_at,
                value_at,
                readable,
                key,
                value,
                dim,
                key_dim,
                value_dim,
                scale,
                HEAD_DIM,
                COMPUTE,
            )
        num_heads = tl.num_programs(1) * HEADS_PER_KV
        if IS_SPLIT:
            at = (token * num_heads + head) * splits + split
            tl.store(out_peak + at, peak, mask=within < HEADS_PER_KV)
            tl.store(out_weight + at, weight, mask=within < HEADS_PER_KV)
            tl.store(out + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)
        else:
            mean = acc / tl.where(weight > 0, weight, 1.0)[:, None]
            at = (token * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out + at, mean.to(out.dtype.element_ty), mask=inside)
