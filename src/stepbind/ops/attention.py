"""Attention of a step's new tokens over their rows' pages: prefill with prior context, chunks, and decode."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from stepbind.caches import KVPages
from stepbind.ops.ragged import RowLayout
from stepbind.plan.plan import PagedPlan, Shared, Sizes

MAX_SCORES = 2**26
"""Attention scores (rows * query heads per KV head * queries * context) that one call may hold a mask for."""


def paged_attention(
    query: torch.Tensor,
    pages: KVPages,
    plan: PagedPlan,
    shared: Shared,
    sizes: Sizes,
    scale: float,
) -> torch.Tensor:
    """Causal attention of query [T, query heads, head dim] over the pages, which hold the new tokens already.

    Query heads are grouped over KV heads in order. A token attends to the positions 0 .. its own of its row that
    have a slot; padding tokens, and tokens that have none to attend to, give zeros. Returns [T, query heads, head dim].
    """
    if query.is_cuda:
        from stepbind.ops import triton_attention

        return triton_attention.paged_attention(query, pages, plan, shared, sizes, scale)
    if sizes.max_context == 0:
        return torch.zeros_like(query)
    key, value, readable = _gather_context(pages, plan, shared)
    return attend_context(query, key, value, readable, shared, sizes, scale)


def attend_context(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    readable: torch.Tensor,
    shared: Shared,
    sizes: Sizes,
    scale: float,
) -> torch.Tensor:
    """Causal attention of query [T, query heads, D] over each row's context: key [B, KV heads, L, D], value
    [B, KV heads, L, Dv], of which `readable` [B, L] bool may be looked at; what may not must be finite.

    Returns [T, query heads, Dv], zero for tokens that have nothing to attend to.
    """
    tokens, num_heads, _ = query.shape
    num_kv_heads, context_len = key.shape[1:3]
    heads_per_kv = num_heads // num_kv_heads
    layout = RowLayout.of(shared, sizes.max_query)

    # [B, KV heads, queries, heads per KV head, D]: the grouped heads share their KV head's keys as more queries.
    padded = layout.pad(query.unflatten(1, (num_kv_heads, heads_per_kv))).permute(0, 2, 1, 3, 4)
    position = shared.prior_len[:, None] + torch.arange(sizes.max_query, device=query.device)
    context = torch.arange(context_len, device=query.device)
    out = padded.new_empty(*padded.shape[:-1], value.shape[-1])
    block = max(1, MAX_SCORES // (layout.rows * heads_per_kv * context_len))
    for start in range(0, sizes.max_query, block):
        part = slice(start, min(start + block, sizes.max_query))
        allowed = readable[:, None, :] & (context <= position[:, part, None])
        mask = allowed.repeat_interleave(heads_per_kv, dim=1)[:, None]
        # A query that may attend to nothing gives zeros here, as law 5 wants (torch's masked softmax, since 2.5).
        out[:, :, part] = scaled_dot_product_attention(
            padded[:, :, part].flatten(2, 3), key, value, attn_mask=mask, scale=scale
        ).unflatten(2, (-1, heads_per_kv))
    return layout.flatten(out.permute(0, 2, 1, 3, 4), tokens).flatten(1, 2)


def _gather_context(pages: KVPages, plan: PagedPlan, shared: Shared) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of each row's context [B, KV heads, L, D], and which of the L positions may be read [B, L].

    What may not be read is zero: a page's unwritten tail can hold anything, and 0 * NaN is NaN.
    """
    table = plan.block_table
    tokens_per_block = pages.key.shape[2]
    row, column = torch.nonzero(table >= 0, as_tuple=True)
    block = table[row, column].long()
    position = torch.arange(table.shape[1] * tokens_per_block, device=table.device)
    readable = (table >= 0).repeat_interleave(tokens_per_block, dim=1) & (position < shared.context_len[:, None])

    def gather(source: torch.Tensor) -> torch.Tensor:
        blocks = source.new_zeros(*table.shape, *source.shape[1:])
        blocks[row, column] = source[block]
        context = blocks.permute(0, 2, 1, 3, 4).flatten(2, 3)
        return context.masked_fill_(~readable[:, None, :, None], 0)

    return gather(pages.key), gather(pages.value), readable
