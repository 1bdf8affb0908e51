"""The entry of full attention: an attention function that transformers calls instead of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stepbind.caches import KVPages
from stepbind.context import current
from stepbind.errors import StepError
from stepbind.ops.attention import paged_attention
from stepbind.ops.cache_write import write_kv
from stepbind.ops.varlen_attention import serves, varlen_attention

NAME = "stepbind"
"""The implementation's name in `config._attn_implementation`. No mask function is registered under it, so that
transformers builds no mask."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # reads the plan and writes the host's cache: not for a compiler to look into
def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Store key and value [1, KV heads, T, head dim] in the layer's pages and attend query [1, heads, T, head dim].

    Returns [1, T, heads, head dim] and no weights, as transformers' attention interface wants.
    Raises `NotBoundError` outside of `bind`, `StepError` for a batch of more than one or a sliding window.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    if query.shape[0] != 1:
        raise StepError(f"layer {layer} query", f"shape {tuple(query.shape)}", "[1, heads, tokens, head dim]")
    if sliding_window is not None:
        raise StepError(f"layer {layer} sliding_window", sliding_window, "full attention")
    context = current()
    plan, pages = context.attention(layer)
    tokens = plan.slot.shape[0]
    if query.shape[2] != tokens:
        raise StepError(f"layer {layer} query", f"{query.shape[2]} tokens", f"the step's {tokens} padded tokens")
    shared, sizes = context.plan.shared, context.plan.sizes
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    repeats = pages.key.shape[1] // key.shape[1]
    if repeats > 1:  # fewer heads here than in the cache, which holds each of them that often (tensor parallelism)
        repeated = [each.repeat_interleave(repeats, dim=1) for each in (key, value)]
        write_kv(pages, repeated[0], repeated[1], plan.slot)
        pages = KVPages(pages.key[:, ::repeats], pages.value[:, ::repeats])
    else:
        write_kv(pages, key, value, plan.slot)
    if serves(query, key, value, pages, sizes):
        return varlen_attention(query, key, value, shared, sizes, scaling)[None], None
    return paged_attention(query, pages, plan, shared, sizes, scaling)[None], None
