"""Latent attention (MLA) over a step's latent pages, on the GPU, dense and over chosen positions.

One kernel for every phase, in the absorbed form (`latent_attention`): all heads of a token read the same latents, so a
program takes a tile of one token's heads and walks through the token's context, as decode attention does for the query
heads of one KV head. Prefill takes no tiles of tokens: heads fill a matrix product as well as tokens would, and tokens
that choose their context share nothing. A latent is loaded once, as key and as value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stepbind.caches import LatentPages
from stepbind.ops.latent_attention import absorbed_query, values_of
from stepbind.ops.triton_attention_splits import context_of, merge_splits, num_splits, positions_per_split
from stepbind.ops.triton_attention_tile import compute_dtype, shared_memory_bytes, soften
from stepbind.plan.plan import PagedPlan, Shared, Sizes

PROGRAMS = 132
"""Programs that a launch should have at least: one for each of an H200's multiprocessors, whose shared memory it fills.
A split costs a partial result of a whole latent for each head, so that there are no more of them."""


def latent_attention(
    query: torch.Tensor,
    weight: torch.Tensor,
    pages: LatentPages,
    plan: PagedPlan,
    shared: Shared,
    sizes: Sizes,
    scale: float,
) -> torch.Tensor:
    """Arguments and result of `latent_attention.latent_attention`. Launches depend on sizes alone; `sizes.max_context`
    may be an upper bound. A context is cut off at the width of `plan.block_table`."""
    absorbed, rotary = absorbed_query(query, weight, pages)
    mixed = attend_latents(absorbed, rotary, pages.latent, None, plan, shared, sizes.max_context, scale)
    return values_of(mixed, query, weight, pages)


def sparse_latent_attention(
    query: torch.Tensor,
    weight: torch.Tensor,
    pages: LatentPages,
    chosen: torch.Tensor,
    plan: PagedPlan,
    shared: Shared,
    scale: float,
) -> torch.Tensor:
    """Arguments and result of `latent_attention.sparse_latent_attention`. A token with a context of n tokens chooses
    in the first n columns of `chosen` alone, as `indexer.choose_tokens` does."""
    absorbed, rotary = absorbed_query(query, weight, pages)
    mixed = attend_latents(absorbed, rotary, pages.latent, chosen, plan, shared, chosen.shape[1], scale)
    return values_of(mixed, query, weight, pages)


@dataclass(frozen=True)
class Tiles:
    """What a program works on at once, and how."""

    heads: int
    tokens: int  # of the context
    warps: int
    stages: int  # tiles of latents under way


def tiles_of(num_heads: int, elements: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Tiles for latents of so many elements. A matrix product has at least 16 rows; more heads share a loaded tile of
    latents, as long as their sums stay in registers."""
    heads = 32 if num_heads > 16 and dtype.itemsize == 2 else 16
    tokens = 64 if dtype.itemsize == 2 else 16
    budget = shared_memory_bytes(device) - heads * elements * dtype.itemsize
    while tokens > 16 and tokens * elements * dtype.itemsize > budget:
        tokens //= 2
    stages = max(1, min(3, budget // (tokens * elements * dtype.itemsize)))
    return Tiles(heads, tokens, 8 if heads == 32 else 4, stages)


def attend_latents(
    query: torch.Tensor,
    rotary: torch.Tensor,
    pages: torch.Tensor,
    chosen: torch.Tensor | None,
    plan: PagedPlan,
    shared: Shared,
    max_context: int,
    scale: float,
) -> torch.Tensor:
    """Weighted latents [T, heads, rank] of absorbed queries [T, heads, rank] with rotary parts [T, heads, rotary dim]
    over pages [blocks, tokens, rank + rotary dim]: of the whole context, or of the chosen [T, K] positions.

    max_context: positions that a token attends to at most, which decides how they are split over programs.
    """
    num_tokens, num_heads, rank = query.shape
    rotary_dim, page = rotary.shape[2], pages.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    tiles = tiles_of(num_heads, rank + rotary_dim, query.dtype, query.device)
    head_tiles = -(-num_heads // tiles.heads)
    splits = num_splits(num_tokens, head_tiles, max_context, tiles.tokens, PROGRAMS)
    target, peak, weight = out, out, out
    if splits > 1:
        target = query.new_empty((num_tokens, num_heads, splits, rank), dtype=torch.float32)
        peak = query.new_empty((num_tokens, num_heads, splits), dtype=torch.float32)
        weight = torch.empty_like(peak)
    # Choices stand in columns of one position each: to the split, K columns of a context are K pages of one token.
    columns, column_tokens = (plan.block_table.shape[1], page) if chosen is None else (chosen.shape[1], 1)
    _attend_latents[(num_tokens, head_tiles, splits)](
        target,
        peak,
        weight,
        query,
        rotary,
        pages,
        plan.block_table,
        plan.block_table if chosen is None else chosen,
        shared.row_of_token,
        shared.query_start,
        shared.prior_len,
        scale * math.log2(math.e),
        pages.shape[0],
        plan.block_table.shape[1],
        plan.block_table.stride(0),
        columns,
        0 if chosen is None else chosen.stride(0),
        *query.stride(),
        *rotary.stride(),
        *pages.stride(),
        num_heads,
        rank,
        rotary_dim,
        page,
        column_tokens,
        tiles.heads,
        max(16, triton.next_power_of_2(rank)),  # a matrix product sums over at least 16
        max(16, triton.next_power_of_2(rotary_dim)),
        tiles.tokens,
        chosen is not None,
        splits > 1,
        compute_dtype(query, pages),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        merge_splits(out, target, peak, weight, shared, columns, column_tokens, tiles.tokens)
    return out


@triton.jit
def _attend_latents(
    out,
    out_peak,
    out_weight,
    query,
    rotary,
    pages,
    table,
    chosen,
    row_of_token,
    query_start,
    prior_len,
    scale,
    num_blocks,
    table_columns,
    table_row,
    columns,
    chosen_token,
    query_token,
    query_head,
    query_dim,
    rotary_token,
    rotary_head,
    rotary_dim,
    page_block,
    page_token,
    page_dim,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMN_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    RANKS: tl.constexpr,
    ROTARY_DIMS: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPARSE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Program (t, i, s): the s-th part of token t's context or choices, for its i-th tile of heads.

    Outputs as `triton_attention._attend_split` has them, of latents.
    """
    token, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    row, context = context_of(tl.program_id(0), row_of_token, query_start, prior_len, columns, COLUMN_TOKENS)
    length = positions_per_split(context, splits, TILE)
    first = split * length
    if (split == 0) | (first < context):
        dim, r_dim = tl.arange(0, RANKS), tl.arange(0, ROTARY_DIMS)
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        inside = (head < NUM_HEADS)[:, None] & (dim < RANK)[None, :]
        r_inside = (head < NUM_HEADS)[:, None] & (r_dim < ROTARY_DIM)[None, :]
        q_at = token * query_token + head[:, None] * query_head + dim[None, :] * query_dim
        q_rotary_at = token * rotary_token + head[:, None] * rotary_head + r_dim[None, :] * rotary_dim
        q = tl.load(query + q_at, mask=inside, other=0).to(COMPUTE)
        q_rotary = tl.load(rotary + q_rotary_at, mask=r_inside, other=0).to(COMPUTE)
        acc = tl.zeros([HEADS, RANKS], tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        peak = tl.full([HEADS], float("-inf"), tl.float32)
        last = tl.minimum(first + length, context)
        for start in range(first, last, TILE):
            position = start + tl.arange(0, TILE)
            covered = position < last
            if IS_SPARSE:
                position = tl.load(chosen + token * chosen_token + position, mask=covered, other=-1)
                covered = (position >= 0) & (position // PAGE < table_columns)
                position = tl.where(covered, position, 0)
            block = tl.load(table + row.to(tl.int64) * table_row + position // PAGE, mask=covered, other=-1)
            readable = (block >= 0) & (block < num_blocks)
            at = block.to(tl.int64) * page_block + (position % PAGE) * page_token
            c_mask = readable[:, None] & (dim < RANK)[None, :]
            c = tl.load(pages + at[:, None] + dim[None, :] * page_dim, mask=c_mask, other=0).to(COMPUTE)
            r_mask = readable[:, None] & (r_dim < ROTARY_DIM)[None, :]
            r_at = at[:, None] + (RANK + r_dim)[None, :] * page_dim
            r = tl.load(pages + r_at, mask=r_mask, other=0).to(COMPUTE)
            score = tl.dot(q_rotary, tl.trans(r), input_precision="ieee")
            score = tl.dot(q, tl.trans(c), score, input_precision="ieee") * scale
            share, shrink, peak, weight = soften(score, readable[None, :], peak, weight)
            acc = tl.dot(share.to(COMPUTE), c, acc * shrink[:, None], input_precision="ieee")
        if IS_SPLIT:
            at = (token * NUM_HEADS + head) * splits + split
            tl.store(out_peak + at, peak, mask=head < NUM_HEADS)
            tl.store(out_weight + at, weight, mask=head < NUM_HEADS)
            tl.store(out + at[:, None] * RANK + dim[None, :], acc, mask=inside)
        else:
            mean = acc / tl.where(weight > 0, weight, 1.0)[:, None]
            at = (token * NUM_HEADS + head)[:, None] * RANK + dim[None, :]
            tl.store(out + at, mean.to(out.dtype.element_ty), mask=inside)
