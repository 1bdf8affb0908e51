"""The forward of a latent attention (MLA) module on the bound context, dense and sparse, shared by all families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stepbind.context import Context, current
from stepbind.errors import StepError
from stepbind.models.family import LatentLayout, Rotary
from stepbind.ops.cache_write import write_latent, write_tokens
from stepbind.ops.indexer import choose_tokens
from stepbind.ops.latent_attention import latent_attention, sparse_latent_attention


@dataclass(frozen=True, eq=False)
class IndexInputs:
    """What an indexer projects from, and the step's rotary angles. T tokens."""

    hidden: torch.Tensor  # [T, hidden size]
    residual: torch.Tensor  # [T, query rank], what the layer's queries are projected from
    cos: torch.Tensor  # [T, rotary dim]
    sin: torch.Tensor  # [T, rotary dim]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # reads the plan and writes the host's cache: not for a compiler to look into
def latent_forward(
    module: Any,
    layout: LatentLayout,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    prev_topk_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    """hidden_states [1, T, hidden size] -> the same shape and no weights; for families that share a choice of tokens
    between layers also the choice [T, K] int32 (`indexer.choose_tokens`), which comes back as `prev_topk_indices`. It
    is None where no row's context is longer than top-k: then every token attends to all of it.

    Takes and ignores what transformers' decoder layers pass beside it (cache, mask, position ids).
    Raises `NotBoundError` outside of `bind`, `StepError` for a batch of more than one, and for a layer that shares a
    choice where no layer before it made one.
    """
    context = current()
    plan, pages = context.latent(module.layer_idx)
    shared, sizes = context.plan.shared, context.plan.sizes
    if hidden_states.shape[:2] != (1, sizes.padded_tokens):
        raise StepError(
            f"layer {module.layer_idx} hidden_states",
            f"shape {tuple(hidden_states.shape)}",
            f"[1, the step's {sizes.padded_tokens} padded tokens, hidden size]",
        )
    hidden = hidden_states[0]
    cos, sin = position_embeddings[0][0], position_embeddings[1][0]
    query, residual = _queries(module, hidden)
    nope_dim, rotary_dim = module.qk_nope_head_dim, module.qk_rope_head_dim
    latent, rotary_key = module.kv_a_proj_with_mqa(hidden).split([module.kv_lora_rank, rotary_dim], dim=-1)
    query_nope, query_rotary = query.split([nope_dim, rotary_dim], dim=-1)
    query_rotary, rotary_key = layout.rotary(module.config)(query_rotary, rotary_key[:, None], cos, sin)
    query = torch.cat([query_nope, query_rotary], dim=-1)
    write_latent(pages, module.kv_a_layernorm(latent), rotary_key.squeeze(1), plan.slot)

    chosen = None
    if layout.index_rotary is not None:
        inputs = IndexInputs(hidden, residual, cos, sin)
        chosen = _choose(module, layout.index_rotary, inputs, prev_topk_indices, context)
    weight = module.kv_b_proj.weight.unflatten(0, (query.shape[1], -1))
    if chosen is None:
        out = latent_attention(query, weight, pages, plan, shared, sizes, module.scaling)
    else:
        out = sparse_latent_attention(query, weight, pages, chosen, plan, shared, module.scaling)
    projected = module.o_proj(out.flatten(1))[None]
    return (projected, None, chosen) if layout.passes_choice else (projected, None)


def _queries(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, heads, nope dim + rotary dim], and what they are projected from (the indexer's queries are too)."""
    if module.q_lora_rank is None:
        projected, residual = module.q_proj(hidden), hidden
    else:
        residual = module.q_a_layernorm(module.q_a_proj(hidden))
        projected = module.q_b_proj(residual)
    return projected.unflatten(-1, (-1, module.qk_head_dim)), residual


def _choose(
    module: Any, rotary: Rotary, inputs: IndexInputs, previous: torch.Tensor | None, context: Context
) -> torch.Tensor | None:
    """The tokens that the layer attends to, None for all. An indexer's keys are stored in any case."""
    plan, pages = context.latent(module.layer_idx)
    everything = context.plan.sizes.max_context <= module.config.index_topk
    indexer = module.indexer
    if indexer is None:
        if previous is None and not everything:
            raise StepError(f"layer {module.layer_idx} choice of tokens", "none", "that of a layer before it")
        return previous
    if pages.index_key is None:
        raise StepError(f"layer {module.layer_idx}", "latent pages without index keys", "index keys for its indexer")
    query, key = _index_query_key(indexer, rotary, inputs)
    write_tokens(pages.index_key, key, plan.slot)
    if everything:
        return None
    weights_proj = indexer.weights_proj  # float32 in a bfloat16 model too
    weight = weights_proj(inputs.hidden.to(weights_proj.weight.dtype)).float()
    weight = weight * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    return choose_tokens(
        query, weight, pages.index_key, indexer.index_topk, plan, context.plan.shared, context.plan.sizes
    )


def _index_query_key(indexer: Any, rotary: Rotary, inputs: IndexInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The indexer's queries [T, heads, dim] and keys [T, dim]; their first elements are rotated."""
    parts = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    query = indexer.wq_b(inputs.residual).unflatten(-1, (-1, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(inputs.hidden))[:, None]
    query_rotary, query_rest = query.split(parts, dim=-1)
    key_rotary, key_rest = key.split(parts, dim=-1)
    query_rotary, key_rotary = rotary(query_rotary, key_rotary, inputs.cos, inputs.sin)
    return torch.cat([query_rotary, query_rest], dim=-1), torch.cat([key_rotary, key_rest], dim=-1).squeeze(1)
