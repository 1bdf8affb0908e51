"""Latent attention (MLA) of a step's new tokens over their rows' latent pages.

A page holds for each token a latent c [rank] and a rotary key r, shared by all heads. With head h's two parts of the
expansion weight, K_h [nope dim, rank] and V_h [value dim, rank] (DeepSeek-V2, arXiv 2405.04434, section 2.1),

    expanded:  key_h = [K_h c, r],  value_h = V_h c
    absorbed:  query_h = [K_h^T q_nope, q_rotary] on the key [c, r] itself,  output_h = V_h (sum of weights * c)

give the same numbers. The expanded form pays for each context token once and little for each (query, context) pair;
the absorbed form pays nothing for the context, and more for each pair.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from stepbind.caches import LatentPages
from stepbind.ops.attention import attend_context
from stepbind.plan.plan import PagedPlan, Shared, Sizes

MAX_GATHERED = 2**26
"""Cache elements (tokens * chosen tokens * elements) that sparse attention may hold at once."""


def latent_attention(
    query: torch.Tensor,
    weight: torch.Tensor,
    pages: LatentPages,
    plan: PagedPlan,
    shared: Shared,
    sizes: Sizes,
    scale: float,
) -> torch.Tensor:
    """Causal attention of query [T, heads, nope dim + rotary dim] over the pages, which hold the new tokens already:
    on the CPU in the cheaper of the two forms, on a GPU absorbed. weight: [heads, nope dim + value dim, rank], keys'
    rows first.

    A token attends to the positions 0 .. its own of its row that have a slot. Returns [T, heads, value dim], zero for
    padding tokens and tokens that have nothing to attend to.
    """
    if query.is_cuda:
        from stepbind.ops import triton_latent_attention

        return triton_latent_attention.latent_attention(query, weight, pages, plan, shared, sizes, scale)
    if sizes.max_context == 0:
        return query.new_zeros(*query.shape[:2], _value_dim(query, weight, pages))
    attend = expanded_attention if expansion_is_cheaper(query, weight, pages, sizes) else absorbed_attention
    return attend(query, weight, pages, plan, shared, sizes, scale)


def expansion_is_cheaper(query: torch.Tensor, weight: torch.Tensor, pages: LatentPages, sizes: Sizes) -> bool:
    """Whether the expanded form multiplies less than the absorbed one, a head, at the sizes that a row can have."""
    rank, key_dim = weight.shape[2], query.shape[2]
    value_dim = _value_dim(query, weight, pages)
    pairs = sizes.max_query * sizes.max_context
    expanded = sizes.max_context * rank * weight.shape[1] + pairs * (key_dim + value_dim)
    absorbed = sizes.max_query * rank * weight.shape[1] + pairs * (pages.latent.shape[2] + rank)
    return expanded < absorbed


def expanded_attention(
    query: torch.Tensor,
    weight: torch.Tensor,
    pages: LatentPages,
    plan: PagedPlan,
    shared: Shared,
    sizes: Sizes,
    scale: float,
) -> torch.Tensor:
    """Arguments and result of `latent_attention`, over keys and values of every head."""
    heads, rank = query.shape[1], weight.shape[2]
    context, readable = gather_context(pages.latent, plan, shared)
    latent, rotary_key = context.to(query.dtype).split([rank, context.shape[2] - rank], dim=-1)
    nope_dim = query.shape[2] - rotary_key.shape[2]
    expanded = linear(latent, weight.flatten(0, 1)).unflatten(-1, (heads, -1)).transpose(1, 2)
    key_nope, value = expanded.split([nope_dim, weight.shape[1] - nope_dim], dim=-1)
    key = torch.cat([key_nope, rotary_key[:, None].expand(-1, heads, -1, -1)], dim=-1)
    return attend_context(query, key, value, readable, shared, sizes, scale)


def absorbed_attention(
    query: torch.Tensor,
    weight: torch.Tensor,
    pages: LatentPages,
    plan: PagedPlan,
    shared: Shared,
    sizes: Sizes,
    scale: float,
) -> torch.Tensor:
    """Arguments and result of `latent_attention`, with all heads on the one latent key."""
    context, readable = gather_context(pages.latent, plan, shared)
    key = context.to(query.dtype)[:, None]
    absorbed = torch.cat(absorbed_query(query, weight, pages), dim=-1)
    mixed = attend_context(absorbed, key, key[..., : weight.shape[2]], readable, shared, sizes, scale)
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
    """Attention of query [T, heads, nope dim + rotary dim] over the chosen tokens alone.

    chosen: [T, K] int32 positions within the token's row, none later than its own; -1 = none. Reads K cache entries a
    token, however long the context. Weight and result as in `latent_attention`; always in absorbed form, since tokens
    choose apart and an expansion would not be shared.
    """
    if query.is_cuda:
        from stepbind.ops import triton_latent_attention

        return triton_latent_attention.sparse_latent_attention(query, weight, pages, chosen, plan, shared, scale)
    rank, elements = weight.shape[2], pages.latent.shape[2]
    slot = slots_of(chosen, plan, shared)
    absorbed = torch.cat(absorbed_query(query, weight, pages), dim=-1)
    mixed = query.new_zeros(*query.shape[:2], rank)
    block = max(1, MAX_GATHERED // max(1, chosen.shape[1] * elements))
    for start in range(0, query.shape[0], block):
        part = slice(start, start + block)
        key = gather_slots(pages.latent, slot[part]).to(query.dtype)[:, None]
        allowed = slot[part] >= 0
        # A token that chose nothing gives zeros (torch's masked softmax, since 2.5).
        mixed[part] = scaled_dot_product_attention(
            absorbed[part, None], key, key[..., :rank], attn_mask=allowed[:, None, None], scale=scale
        ).squeeze(1)
    return values_of(mixed, query, weight, pages)


def gather_context(pages: torch.Tensor, plan: PagedPlan, shared: Shared) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's context [B, L, elements] out of pages [blocks, tokens, elements], and which of the L positions may be
    read [B, L] bool. What may not be read is zero: unwritten or foreign memory can hold NaN, and 0 * NaN is NaN."""
    table, tokens_per_block = plan.block_table, pages.shape[1]
    row, column = torch.nonzero(table >= 0, as_tuple=True)
    blocks = pages.new_zeros(*table.shape, *pages.shape[1:])
    blocks[row, column] = pages[table[row, column].long()]
    context = blocks.flatten(1, 2)
    position = torch.arange(context.shape[1], device=table.device)
    readable = (table >= 0).repeat_interleave(tokens_per_block, dim=1) & (position < shared.context_len[:, None])
    return context.masked_fill_(~readable[..., None], 0), readable


def slots_of(chosen: torch.Tensor, plan: PagedPlan, shared: Shared) -> torch.Tensor:
    """Slots [T, K] int64 of chosen [T, K] positions within each token's row; -1 for none, for padding tokens, and for
    positions that have no block."""
    size, columns = plan.group.kernel_block_size, plan.block_table.shape[1]
    if columns == 0:  # a dummy step
        return torch.full_like(chosen, -1, dtype=torch.int64)
    row = shared.row_of_token.long()
    column = chosen.long().div(size, rounding_mode="floor")
    inside = (row >= 0)[:, None] & (chosen >= 0) & (column < columns)
    block = plan.block_table[row.clamp(min=0)[:, None], torch.where(inside, column, 0)].long()
    return torch.where(inside & (block >= 0), block * size + chosen % size, -1)


def gather_slots(pages: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """[T, K, elements] out of pages [blocks, tokens, elements] at slot [T, K] int64; zero for -1, nothing read."""
    gathered = pages.new_zeros(*slot.shape, pages.shape[2])
    token, index = torch.nonzero(slot >= 0, as_tuple=True)
    kept = slot[token, index]
    gathered[token, index] = pages[kept // pages.shape[1], kept % pages.shape[1]]
    return gathered


def _value_dim(query: torch.Tensor, weight: torch.Tensor, pages: LatentPages) -> int:
    return weight.shape[1] - _nope_dim(query, weight, pages)


def _nope_dim(query: torch.Tensor, weight: torch.Tensor, pages: LatentPages) -> int:
    return query.shape[2] - (pages.latent.shape[2] - weight.shape[2])


def absorbed_query(query: torch.Tensor, weight: torch.Tensor, pages: LatentPages) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries on the latent key itself: on its latent [T, heads, rank], on its rotary key [T, heads, rotary dim]."""
    nope_dim = _nope_dim(query, weight, pages)
    absorbed = torch.einsum("thn,hnr->thr", query[..., :nope_dim], weight[:, :nope_dim])
    return absorbed, query[..., nope_dim:]


def values_of(mixed: torch.Tensor, query: torch.Tensor, weight: torch.Tensor, pages: LatentPages) -> torch.Tensor:
    """Values of weighted latents [T, heads, rank]: [T, heads, value dim]."""
    return torch.einsum("thr,hvr->thv", mixed, weight[:, _nope_dim(query, weight, pages) :])
