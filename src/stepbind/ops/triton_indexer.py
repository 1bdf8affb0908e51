"""The indexer's scores and the choice of tokens by them, on the GPU.

A score has to depend on its query, weights and key alone, not on where they stand or what else is in the batch, so that
equal keys score equal and ties fall as on the CPU. Products of 16-bit numbers are exact in float32, and a score's sums
are made in the same order wherever it stands in a tile: tensor cores and float32 sums keep the rule. Float32 numbers
are multiplied and added up in float64 and the score is rounded once, as on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepbind.ops.triton_attention_tile import compute_dtype
from stepbind.ops.triton_top_k import best_positions
from stepbind.plan.plan import PagedPlan, Shared, Sizes

MAX_SCORES = 2**27
"""Scores (tokens * context) that one launch may leave, 4 bytes each."""
PROGRAMS = 528
"""Programs that a launch of scores should have at least: four for each of an H200's 132 multiprocessors."""
TOKENS_AT_ONCE = 16
"""New tokens of a row that share a loaded tile of keys."""


def choose_tokens(
    query: torch.Tensor,
    weight: torch.Tensor,
    index_key: torch.Tensor,
    top_k: int,
    plan: PagedPlan,
    shared: Shared,
    sizes: Sizes,
) -> torch.Tensor:
    """Arguments and result of `indexer.choose_tokens`. Launches depend on sizes alone; `sizes.max_context` and
    `sizes.max_query` may be upper bounds. A context is cut off at the width of `plan.block_table`."""
    tokens, positions = query.shape[0], plan.block_table.shape[1] * plan.group.kernel_block_size
    chosen = torch.empty(tokens, min(top_k, positions), dtype=torch.int32, device=query.device)
    if chosen.numel() == 0:
        return chosen
    limit = min(sizes.max_context, positions)
    width = max(16, -(-limit // 16) * 16)  # of a row of scores
    block = max(1, MAX_SCORES // width)
    for first in range(0, tokens, block):
        last = min(first + block, tokens)
        scores = torch.empty(last - first, width, dtype=torch.float32, device=query.device)
        index_scores(scores, query, weight, index_key, first, limit, plan, shared, sizes)
        best_positions(chosen[first:last], scores, first, limit, shared)
    return chosen


def index_scores(
    scores: torch.Tensor,
    query: torch.Tensor,
    weight: torch.Tensor,
    index_key: torch.Tensor,
    first: int,
    limit: int,
    plan: PagedPlan,
    shared: Shared,
    sizes: Sizes,
) -> None:
    """Scores [N, at least `limit`] float32 of the tokens first .. first + N - 1 on the positions 0 .. their own of
    their row, below `limit`; -inf where the row has no block. Nothing is written behind a token's own position."""
    num_heads, dim = query.shape[1:]
    compute = compute_dtype(query, index_key)
    exact = compute == tl.float32
    tile = 32 if exact else 128
    at_once = min(TOKENS_AT_ONCE, triton.next_power_of_2(max(1, sizes.max_query)))
    query_tiles, rows = max(1, -(-sizes.max_query // at_once)), shared.query_len.shape[0]
    parts = max(1, min(-(-PROGRAMS // (query_tiles * rows)), -(-limit // tile)))
    _score_tokens[(query_tiles, parts, rows)](
        scores,
        query,
        weight,
        index_key,
        plan.block_table,
        shared.query_start,
        shared.query_len,
        shared.prior_len,
        first,
        first + scores.shape[0],
        limit,
        index_key.shape[0],
        plan.block_table.stride(0),
        scores.stride(0),
        *query.stride(),
        *weight.stride(),
        *index_key.stride(),
        num_heads,
        dim,
        index_key.shape[1],
        max(16, triton.next_power_of_2(num_heads)),
        max(16, triton.next_power_of_2(dim)),
        at_once,
        tile,
        tl.float64 if exact else compute,
        tl.float64 if exact else tl.float32,
        num_warps=4,
        num_stages=1 if exact else 3,
    )


@triton.jit(do_not_specialize=["first_token", "last_token", "limit", "score_token"])
def _score_tokens(
    scores,
    query,
    weight,
    key,
    table,
    query_start,
    query_len,
    prior_len,
    first_token,
    last_token,
    limit,
    num_blocks,
    table_row,
    score_token,
    query_token,
    query_head,
    query_dim,
    weight_token,
    weight_head,
    key_block,
    key_token,
    key_dim,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
    SUM: tl.constexpr,
):
    """Program (i, p, r): TOKENS new tokens of row r, those with the longest context first, on every p-th tile of the
    row's keys."""
    row = tl.program_id(2)
    from_offset = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    start, length, prior = tl.load(query_start + row), tl.load(query_len + row), tl.load(prior_len + row)
    from_token = tl.maximum(start + from_offset, first_token)
    to_token = tl.minimum(start + tl.minimum(from_offset + TOKENS, length), last_token)
    # Positions that the last of these tokens sees; none where there are no such tokens.
    context = tl.where(from_token < to_token, tl.minimum(prior + to_token - start, limit), 0)
    head, dim = tl.arange(0, HEADS), tl.arange(0, DIMS)
    q_mask = (head < NUM_HEADS)[:, None] & (dim < DIM)[None, :]
    query += from_token.to(tl.int64) * query_token
    weight += from_token.to(tl.int64) * weight_token
    scores += (from_token - first_token).to(tl.int64) * score_token
    w_at = head * weight_head
    q_at = head[:, None] * query_head + dim[None, :] * query_dim
    if TOKENS == 1:  # the keys come by themselves then, and their loads overlap with products
        heads = tl.where(context > 0, NUM_HEADS, 0)
        q = tl.load(query + q_at, mask=q_mask & (head < heads)[:, None], other=0).to(COMPUTE)
        w = tl.load(weight + w_at, mask=head < heads, other=0).to(SUM)
    for first in range(tl.program_id(1) * TILE, context, tl.num_programs(1) * TILE):
        position = first + tl.arange(0, TILE)
        covered = position < context
        block = tl.load(table + row.to(tl.int64) * table_row + position // PAGE, mask=covered, other=-1)
        readable = (block >= 0) & (block < num_blocks)
        k_at = block.to(tl.int64) * key_block + (position % PAGE) * key_token
        k_mask = readable[None, :] & (dim < DIM)[:, None]
        k = tl.load(key + k_at[None, :] + dim[:, None] * key_dim, mask=k_mask, other=0).to(COMPUTE)
        if TOKENS == 1:
            tl.store(scores + position, _scores_of(q, w, k, readable, SUM), mask=covered)
        else:
            for token in range(from_token, to_token):
                near = token - from_token
                q = tl.load(query + near * query_token + q_at, mask=q_mask, other=0).to(COMPUTE)
                w = tl.load(weight + near * weight_token + w_at, mask=head < NUM_HEADS, other=0).to(SUM)
                score = _scores_of(q, w, k, readable, SUM)
                seen = covered & (position <= prior + token - start)
                tl.store(scores + near * score_token + position, score, mask=seen)


@triton.jit
def _scores_of(q, w, k, readable, SUM: tl.constexpr):
    """Scores [TILE] of one token's queries [HEADS, DIMS] and weights [HEADS] on keys [DIMS, TILE]."""
    product = tl.dot(q, k, tl.zeros([q.shape[0], k.shape[1]], SUM), input_precision="ieee", out_dtype=SUM)
    score = tl.sum(tl.where(product > 0, product, 0.0) * w[:, None], axis=0).to(tl.float32)
    return tl.where(readable, score, float("-inf"))
