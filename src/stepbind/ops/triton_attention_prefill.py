"""Attention of a prefill's tokens over paged keys and values, on the GPU: tiles of a row's tokens together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepbind.caches import KVPages
from stepbind.ops.triton_attention_tile import attend_tile, compute_dtype, tile_tokens
from stepbind.plan.plan import PagedPlan, Shared, Sizes


def attend_rows(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: KVPages,
    plan: PagedPlan,
    shared: Shared,
    sizes: Sizes,
    scale: float,
) -> None:
    """Tiles of a row's tokens together: prefill."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, rows = pages.key.shape[1], shared.query_len.shape[0]
    tokens_at_once = 64 if query.element_size() == 2 else 32
    query_tiles = max(1, -(-sizes.max_query // tokens_at_once))
    _attend_query_tile[(query_tiles, num_heads, rows + 1)](
        out,
        query,
        pages.key,
        pages.value,
        plan.block_table,
        shared.query_start,
        shared.query_len,
        shared.prior_len,
        scale,
        num_tokens,
        pages.key.shape[0],
        plan.block_table.shape[1],
        plan.block_table.stride(0),
        *query.stride(),
        *pages.key.stride(),
        *pages.value.stride(),
        num_heads // num_kv_heads,
        head_dim,
        pages.key.shape[2],
        triton.next_power_of_2(head_dim),
        tokens_at_once,
        tile_tokens(head_dim),
        compute_dtype(query, pages.key),
        num_warps=4,
        num_stages=2 if query.element_size() == 2 else 1,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _attend_query_tile(
    out,
    query,
    key,
    value,
    table,
    query_start,
    query_len,
    prior_len,
    scale,
    num_tokens,
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
    DIMS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Program (i, h, r): TOKENS new tokens of row r, those with the longest context first, for query head h. The
    programs of the row past the last one write zeros to padding tokens."""
    head, row = tl.program_id(1), tl.program_id(2)
    query_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    num_heads = tl.num_programs(1)
    dim = tl.arange(0, DIMS)
    token_start = tl.load(query_start + row)
    if row == tl.num_programs(2) - 1:
        stride = tl.num_programs(0) * TOKENS
        for first in range(token_start + query_tile * TOKENS, num_tokens, stride):
            token = (first + tl.arange(0, TOKENS)).to(tl.int64)
            inside = (token < num_tokens)[:, None] & (dim < HEAD_DIM)[None, :]
            at = (token * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out + at, tl.zeros([TOKENS, DIMS], out.dtype.element_ty), mask=inside)
    else:
        length = tl.load(query_len + row)
        if query_tile * TOKENS < length:
            prior = tl.load(prior_len + row)
            offset = query_tile * TOKENS + tl.arange(0, TOKENS)
            token = (token_start + offset).to(tl.int64)
            inside = ((offset < length) & (token < num_tokens))[:, None] & (dim < HEAD_DIM)[None, :]
            q_at = (token * query_token)[:, None] + head * query_head + dim[None, :] * query_dim
            q = tl.load(query + q_at, mask=inside, other=0).to(COMPUTE)
            acc = tl.zeros([TOKENS, DIMS], tl.float32)
            weight = tl.zeros([TOKENS], tl.float32)
            peak = tl.full([TOKENS], float("-inf"), tl.float32)
            kv_head = head // HEADS_PER_KV
            last = prior + tl.minimum((query_tile + 1) * TOKENS, length)
            last = tl.minimum(last, table_columns * PAGE)
            for start in range(0, last, TILE):
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
                    readable[None, :] & (position[None, :] <= (prior + offset)[:, None]),
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
            mean = acc / tl.where(weight > 0, weight, 1.0)[:, None]
            at = (token * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out + at, mean.to(out.dtype.element_ty), mask=inside)
