"""Prefill attention by the library where it takes less time than ours: torch's varlen attention over a pass's own keys.

Where no row has prior context, all that a new token may attend to is in the pass itself. The kernel (Flash Attention 2,
arXiv 2307.08691) then follows no block table, so that no table can hurt it. The library's kernels over pages, torch's
own and FlashInfer's, are never chosen: they follow a table's entries unchecked and know of no position without a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any

import torch

from stepbind.caches import KVPages
from stepbind.plan.plan import Shared, Sizes
from stepbind.step import INT32_MAX, Phase

FASTER_FROM: dict[int, int] = {128: 2048, 256: 512}
"""Head dim -> tokens of a pass's longest row from which torch's varlen attention took less time than ours on an H200
(bench/results/2026-12-01-h200-attention.md: two thirds of it). Head dims that were not measured are ours."""
DTYPES = (torch.bfloat16, torch.float16)


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pages: KVPages, sizes: Sizes) -> bool:
    """Whether `varlen_attention` attends a pass, rather than `paged_attention`. Looks at what the host knows alone.

    Arguments as theirs. False with prior context; for padding tokens, which the library leaves unwritten; for pages of
    another dtype, which hold other values than key and value; and wherever the library was not measured faster.
    """
    if sizes.phase is not Phase.PREFILL or sizes.max_query < FASTER_FROM.get(query.shape[-1], INT32_MAX):
        return False
    return (
        not sizes.prior_len.any()
        and sizes.padded_tokens == sizes.num_tokens
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype == pages.key.dtype == pages.value.dtype
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and unsupported(query.device) is None
    )


@cache
def unsupported(device: torch.device) -> str | None:
    """Why a device can't run torch's varlen attention, or was never tried; None where it can."""
    if device.type != "cuda":
        return f"it does not run on {device.type}"
    if torch.version.hip is not None:
        return "it was not measured on AMD"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without Flash Attention"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "Flash Attention needs compute capability 8.0"
    return None


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shared: Shared, sizes: Sizes, scale: float
) -> torch.Tensor:
    """Causal attention of query [T, query heads, D] over the new tokens' own key and value [T, KV heads, D], each row
    on its own. For passes that `serves` says yes to. Returns [T, query heads, D].

    Equal to `paged_attention` where every new token has a slot. One without, which is a fault that the fill has
    counted, is attended to here all the same, as its key is at hand; nothing is read or written through its block.
    """
    longest = sizes.max_query
    out: torch.Tensor = varlen_function()(
        query,
        key,
        value,
        shared.query_start,
        shared.query_start,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),  # causal
    )
    return out


@cache
def varlen_function() -> Callable[..., Any]:
    """torch's function, which takes fewer KV heads than query heads."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 groups query heads without being asked; later ones want to be.
    return partial(varlen_attn, enable_gqa=True) if "enable_gqa" in signature(varlen_attn).parameters else varlen_attn
