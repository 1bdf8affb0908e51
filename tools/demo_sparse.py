"""Training the sparse model: attention over everything first, then the indexers, then both together.

transformers runs an indexer without gradients and attends over what it chose. Training needs three other things of
the same modules: all tokens attended to (the model has to know what to look for before anybody can choose it), the
indexer's scores with gradients, and the attention's own distribution to hold them against (DeepSeek-V3.2 report,
section 2.1.1: a dense warm-up that trains the indexer alone, then sparse training of everything).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

DENSE, INDEXED, SPARSE = "demo_dense", "demo_indexed", "demo_sparse"


def _dense(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


def _indexed(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    """Attends to everything, and holds the indexer's scores against what that attention is."""
    loss = _divergence(_shares(query, key, scaling, None), module.indexer.scores)
    module.indexer.loss = loss
    return _dense(module, query, key, value, mask, scaling)


def _sparse(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    """Attends to the chosen tokens, and holds the scores of those against it."""
    chosen = module.indexer.chosen
    shares = _shares(query.detach(), key.detach(), scaling, chosen)
    module.indexer.loss = _divergence(shares, module.indexer.scores.masked_fill(~chosen, -torch.inf))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=chosen[:, None], scale=scaling)
    return out.transpose(1, 2), None


@torch.no_grad()
def _shares(query: Any, key: Any, scaling: float, chosen: Any) -> Any:
    """What part of its attention each token gives to each, all heads together: (batch, tokens, tokens)."""
    tokens = query.shape[2]
    allowed = _causal(tokens, query.device) if chosen is None else chosen
    total = torch.zeros(query.shape[0], tokens, tokens, device=query.device)
    for head in range(query.shape[1]):
        logits = (query[:, head] @ key[:, head].transpose(-1, -2)).float() * scaling
        total += logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return total / query.shape[1]


def _divergence(shares: Any, scores: Any) -> Any:
    """Kullback-Leibler divergence of the scores' softmax from the attention's shares, nats a token."""
    log_chosen = scores.log_softmax(-1).masked_fill(shares == 0, 0.0)
    return (torch.xlogy(shares, shares) - shares * log_chosen).sum(-1).mean()


def _causal(tokens: int, device: Any) -> Any:
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()


def _scored(indexer: Any, hidden: Any, q_resid: Any, positions: Any, *_: Any, **__: Any) -> Any:
    """The indexer's scores, with gradients for its own weights only; the choice of the best as a mask beside them."""
    hidden, q_resid = hidden.detach(), q_resid.detach()
    rows, tokens, _width = hidden.shape
    rotary = indexer.qk_rope_head_dim
    query = indexer.wq_b(q_resid).view(rows, tokens, indexer.n_heads, indexer.head_dim)
    key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    q_rotated, k_rotated = apply_rotary_pos_emb_interleave(
        query[..., :rotary], key[..., :rotary], *positions, unsqueeze_dim=2
    )
    query = torch.cat([q_rotated, query[..., rotary:]], dim=-1)
    key = torch.cat([k_rotated, key[..., rotary:]], dim=-1).squeeze(2)
    weights = indexer.weights_proj(hidden).float() * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    scores = torch.zeros(rows, tokens, tokens, device=hidden.device)
    for head in range(indexer.n_heads):
        products = query[:, :, head] @ key.transpose(-1, -2)
        scores = scores + weights[..., head, None] * F.relu(products).float()
    scores = scores.masked_fill(~_causal(tokens, hidden.device), -torch.inf)
    indexer.scores = scores
    with torch.no_grad():
        count = min(indexer.index_topk, tokens)
        best = scores.topk(count, dim=-1).indices
        indexer.chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & (scores > -math.inf)
    return None


def _unscored(indexer: Any, hidden: Any, *_: Any, **__: Any) -> Any:
    return None


AttentionInterface.register(DENSE, _dense)
AttentionInterface.register(INDEXED, _indexed)
AttentionInterface.register(SPARSE, _sparse)
for _name in (DENSE, INDEXED, SPARSE):
    AttentionMaskInterface.register(_name, sdpa_mask)


@contextmanager
def attending(model: Any, how: str) -> Iterator[None]:
    """The model with attention over everything (DENSE), the same with indexers scored (INDEXED), or SPARSE."""
    before = model.config._attn_implementation
    model.config._attn_implementation = how
    for layer in model.model.layers:
        indexer = layer.self_attn.indexer
        indexer.forward = (_unscored if how == DENSE else _scored).__get__(indexer)
    try:
        yield
    finally:
        model.config._attn_implementation = before
        for layer in model.model.layers:
            del layer.self_attn.indexer.forward


def indexer_loss(model: Any) -> Any:
    """The divergence of all indexers together, of the last forward. Leaves nothing of it behind."""
    total = torch.zeros((), device=model.device)
    for layer in model.model.layers:
        indexer = layer.self_attn.indexer
        total = total + indexer.loss
        indexer.loss = indexer.scores = indexer.chosen = None
    return total


def indexer_weights(model: Any) -> list[Any]:
    return [weight for layer in model.model.layers for weight in layer.self_attn.indexer.parameters()]
