"""Latent attention and its indexer in plain Python over tokens, heads and positions, to be checked by eye."""

from __future__ import annotations

import torch

from stepbind.caches import LatentPages
from stepbind.plan.plan import PagedPlan, Shared


def latent_attention_reference(
    query: torch.Tensor,
    weight: torch.Tensor,
    pages: LatentPages,
    plan: PagedPlan,
    shared: Shared,
    scale: float,
    chosen: list[list[int]] | None = None,
) -> torch.Tensor:
    """Arguments and result of `latent_attention.latent_attention`; with `chosen`, the positions of each token, those
    of `latent_attention.sparse_latent_attention`. In the model's own form: keys and values of each head."""
    rank = weight.shape[2]
    nope_dim = query.shape[2] - (pages.latent.shape[2] - rank)
    out = query.new_zeros(query.shape[0], query.shape[1], weight.shape[1] - nope_dim)
    for t in range(query.shape[0]):
        positions = range(own_position(shared, t) + 1) if chosen is None else chosen[t]
        entries = [entry for p in positions if (entry := entry_at(pages.latent, plan, shared, t, p)) is not None]
        if not entries:
            continue
        for head in range(query.shape[1]):
            keys = [torch.cat([weight[head, :nope_dim] @ entry[:rank], entry[rank:]]) for entry in entries]
            values = [weight[head, nope_dim:] @ entry[:rank] for entry in entries]
            scores = torch.stack(keys) @ query[t, head] * scale
            out[t, head] = torch.softmax(scores, dim=0) @ torch.stack(values)
    return out


def choose_tokens_reference(
    query: torch.Tensor,
    weight: torch.Tensor,
    index_key: torch.Tensor,
    top_k: int,
    plan: PagedPlan,
    shared: Shared,
) -> list[list[int]]:
    """Arguments of `indexer.choose_tokens`; the positions that each token chooses, ascending."""
    chosen = []
    for t in range(query.shape[0]):
        scored = []
        for position in range(own_position(shared, t) + 1):
            key = entry_at(index_key, plan, shared, t, position)
            if key is None:
                continue
            score = 0.0
            for head in range(query.shape[1]):
                product = sum(float(q) * float(k) for q, k in zip(query[t, head], key, strict=True))
                score += float(weight[t, head]) * max(product, 0.0)
            scored.append((-float(torch.tensor(score, dtype=torch.float32)), position))
        scored.sort()  # the best first, and the earliest of equals
        chosen.append(sorted(position for _, position in scored[:top_k]))
    return chosen


def own_position(shared: Shared, token: int) -> int:
    """A token's position within its row's context; -1 for padding."""
    row = int(shared.row_of_token[token])
    return -1 if row < 0 else int(shared.prior_len[row]) + token - int(shared.query_start[row])


def entry_at(pages: torch.Tensor, plan: PagedPlan, shared: Shared, token: int, position: int) -> torch.Tensor | None:
    """What the pages hold of a position of the token's row; None where it has no block."""
    size = pages.shape[1]
    block = int(plan.block_table[int(shared.row_of_token[token]), position // size])
    return pages[block, position % size] if block >= 0 else None
