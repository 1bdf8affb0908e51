"""Writing new tokens into paged caches."""

from __future__ import annotations

import torch

from stepbind.caches import KVPages


def write_kv(pages: KVPages, key: torch.Tensor, value: torch.Tensor, slot: torch.Tensor) -> None:
    """Store key, value [T, KV heads, head dim] at slot [T] int64; tokens with slot -1 are skipped."""
    if key.is_cuda:
        from stepbind.ops import triton_cache_write

        return triton_cache_write.write_kv(pages, key, value, slot)
    token = torch.nonzero(slot >= 0).squeeze(1)
    tokens_per_block = pages.key.shape[2]
    kept = slot[token]
    block, offset = kept // tokens_per_block, kept % tokens_per_block
    pages.key[block, :, offset] = key[token].to(pages.key.dtype)
    pages.value[block, :, offset] = value[token].to(pages.value.dtype)
