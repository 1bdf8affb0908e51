"""The positions of each token's k best scores, on the GPU, without a sort: `indexer.stable_top_k` says it plainly.

The k-th best score is found two bits at a time, from the highest: three counts of the scores at least as large decide
each pair (a radix selection). What is above it is taken, and of the scores equal to it the earliest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepbind.ops.triton_attention_splits import context_of
from stepbind.plan.plan import Shared

TILE = 8192
"""Scores that a program looks at together, where contexts are that long."""


def best_positions(chosen: torch.Tensor, scores: torch.Tensor, first: int, limit: int, shared: Shared) -> None:
    """Fill chosen [N, k] int32 with the positions of the k best of scores [N, at least `limit`] float32, ascending, -1
    behind the last, for the tokens first .. first + N - 1. -inf is never chosen, nor what is behind a token's own
    position, which may be anything. Of equal scores the earlier is taken."""
    tile = max(16, min(TILE, triton.next_power_of_2(limit)))
    _best_positions[(chosen.shape[0],)](
        chosen,
        scores,
        shared.row_of_token,
        shared.query_start,
        shared.prior_len,
        first,
        limit,
        scores.stride(0),
        chosen.shape[1],
        tile,
        num_warps=max(1, min(8, tile // 256)),
    )


@triton.jit
def _ordered(scores, first, context, TILE: tl.constexpr):
    """The scores at first .. first + TILE - 1 as integers of the same order, and which of them can be chosen."""
    position = first + tl.arange(0, TILE)
    score = tl.load(scores + position, mask=position < context, other=float("-inf"))
    score = tl.where(score == 0, 0.0, score)  # -0 equals 0
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), score > float("-inf")


@triton.jit
def _count_from(scores, context, low, step, TILE: tl.constexpr):
    """How many scores are low + step or more, low + 2 * step or more, low + 3 * step or more."""
    once, twice, thrice = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for first in range(0, context, TILE):
        order, allowed = _ordered(scores, first, context, TILE)
        once += (allowed & (order >= low + step)).to(tl.int32)
        twice += (allowed & (order >= low + 2 * step)).to(tl.int32)
        thrice += (allowed & (order >= low + 3 * step)).to(tl.int32)
    return tl.sum(once), tl.sum(twice), tl.sum(thrice)


@triton.jit(do_not_specialize=["first_token", "limit", "score_token"])
def _best_positions(
    chosen,
    scores,
    row_of_token,
    query_start,
    prior_len,
    first_token,
    limit,
    score_token,
    K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program n: token first_token + n."""
    _, context = context_of(first_token + tl.program_id(0), row_of_token, query_start, prior_len, limit, 1)
    scores += tl.program_id(0).to(tl.int64) * score_token
    chosen += tl.program_id(0).to(tl.int64) * K
    # The largest number that at least K scores reach, or the smallest of all: then everything is taken.
    low = tl.full([], -(2**31), tl.int32)
    for digit in range(0, tl.where(context > K, 16, 0)):
        step = tl.full([], 1, tl.int32) << (30 - 2 * digit)
        once, twice, thrice = _count_from(scores, context, low, step, TILE)
        low += step * ((once >= K).to(tl.int32) + (twice >= K).to(tl.int32) + (thrice >= K).to(tl.int32))
    above, _, _ = _count_from(scores, context, low, 1, TILE)
    missing = tl.maximum(K - above, 0)  # taken of those that are equal to it
    higher_before, equal_before = 0, 0
    for first in range(0, context, TILE):
        order, allowed = _ordered(scores, first, context, TILE)
        higher, equal = (allowed & (order > low)).to(tl.int32), (allowed & (order == low)).to(tl.int32)
        higher_rank, equal_rank = tl.cumsum(higher, 0) + higher_before, tl.cumsum(equal, 0) + equal_before
        taken = (higher > 0) | ((equal > 0) & (equal_rank <= missing))
        column = higher_rank + tl.minimum(equal_rank, missing) - 1
        tl.store(chosen + column, first + tl.arange(0, TILE), mask=taken & (column < K))
        higher_before += tl.sum(higher)
        equal_before += tl.sum(equal)
    for first in range(higher_before + tl.minimum(equal_before, missing), K, TILE):
        column = first + tl.arange(0, TILE)
        tl.store(chosen + column, tl.full([TILE], -1, tl.int32), mask=column < K)
