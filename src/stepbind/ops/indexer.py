"""The indexer of sparse latent attention: which k tokens of its context each new token attends to.

Query t scores position s of its row, up to its own, as sum over heads h of weight[t, h] * relu(query[t, h] . key[s])
(DeepSeek-V3.2, equation 1) and attends to the k best. Of equal scores the earlier position is taken, so that a choice
depends on nothing but the row.
"""

from __future__ import annotations

import torch

from stepbind.ops.latent_attention import gather_context
from stepbind.ops.ragged import RowLayout
from stepbind.plan.plan import PagedPlan, Shared, Sizes

MAX_HEAD_SCORES = 2**25
"""Scores of single heads (rows * queries * heads * context) that one call may hold."""


def choose_tokens(
    query: torch.Tensor,
    weight: torch.Tensor,
    index_key: torch.Tensor,
    top_k: int,
    plan: PagedPlan,
    shared: Shared,
    sizes: Sizes,
) -> torch.Tensor:
    """Positions that each token attends to: [T, K] int32, within its row, ascending, -1 behind the last.

    query: [T, heads, dim]; weight: [T, heads], all scales included; index_key: pages [kernel blocks, tokens, dim],
    which hold the new tokens already. K is `top_k`, or the columns of the block table in tokens where that is less.
    Padding tokens choose nothing, and positions without a slot are never chosen.
    """
    if query.is_cuda:
        from stepbind.ops import triton_indexer

        return triton_indexer.choose_tokens(query, weight, index_key, top_k, plan, shared, sizes)
    tokens = query.shape[0]
    width = min(top_k, plan.block_table.shape[1] * plan.group.kernel_block_size)
    chosen = torch.full((tokens, width), -1, dtype=torch.int32, device=query.device)
    if sizes.max_context == 0:
        return chosen
    layout = RowLayout.of(shared, sizes.max_query)
    key, readable = gather_context(index_key, plan, shared)
    padded_query, padded_weight = layout.pad(query), layout.pad(weight)
    position = shared.prior_len[:, None] + torch.arange(sizes.max_query, device=query.device)
    context = torch.arange(key.shape[1], device=query.device)
    best = []
    block = max(1, MAX_HEAD_SCORES // (layout.rows * query.shape[1] * key.shape[1]))
    for start in range(0, sizes.max_query, block):
        part = slice(start, min(start + block, sizes.max_query))
        allowed = readable[:, None, :] & (context <= position[:, part, None])
        scores = index_scores(padded_query[:, part], padded_weight[:, part], key)
        best.append(stable_top_k(scores, allowed, width))
    by_row = torch.cat(best, dim=1)
    chosen[layout.token] = by_row[layout.row, layout.offset]
    return chosen


def index_scores(query: torch.Tensor, weight: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Scores [B, Q, L] float32 of query [B, Q, heads, dim], weight [B, Q, heads] on key [B, L, dim].

    Sums are float64 and rounded once, so that equal keys score equal: the order in which a matrix product adds up
    changes with its shape, that is with the rest of the batch, and would decide between them.
    """
    products = query.double().flatten(1, 2) @ key.double().transpose(1, 2)  # [B, Q * heads, L]
    per_head = products.relu_().unflatten(1, query.shape[1:3])
    scores: torch.Tensor = (weight.double()[:, :, None] @ per_head).squeeze(2)
    return scores.float()


def stable_top_k(scores: torch.Tensor, allowed: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k best allowed scores along the last dimension, [..., k] int32, ascending, -1 behind the last.

    Everything above the k-th best score is taken, then of those equal to it the earliest. k is at most the last
    dimension of `scores`.
    """
    scores = scores.masked_fill(~allowed, -torch.inf)
    threshold = scores.topk(k, dim=-1).values[..., -1:]
    above = scores > threshold
    missing = k - above.sum(dim=-1, keepdim=True)
    equal = (scores == threshold) & allowed
    taken = (above | (equal & (equal.cumsum(dim=-1) <= missing))) & allowed
    # Column k takes what is not chosen, and is cut off.
    column = torch.where(taken, taken.cumsum(dim=-1) - 1, k)
    position = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device).expand_as(scores)
    out = torch.full((*scores.shape[:-1], k + 1), -1, dtype=torch.int32, device=scores.device)
    return out.scatter_(-1, column, position)[..., :k]
