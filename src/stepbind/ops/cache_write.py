"""Writing new tokens into paged caches."""

from __future__ import annotations

import torch

from stepbind.caches import KVPages, LatentPages


def write_kv(pages: KVPages, key: torch.Tensor, value: torch.Tensor, slot: torch.Tensor) -> None:
    """Store key, value [T, KV heads, head dim] at slot [T] int64; tokens with slot -1 are skipped."""
    if key.is_cuda:
        from stepbind.ops import triton_cache_write

        return triton_cache_write.write_kv(pages, key, value, slot)
    token, block, offset = _places(slot, pages.key.shape[2])
    pages.key[block, :, offset] = key[token].to(pages.key.dtype)
    pages.value[block, :, offset] = value[token].to(pages.value.dtype)


def write_latent(pages: LatentPages, latent: torch.Tensor, rotary_key: torch.Tensor, slot: torch.Tensor) -> None:
    """Store latent [T, rank] and rotary key [T, rotary dim] side by side at slot [T] int64; -1 is skipped."""
    if latent.is_cuda:
        from stepbind.ops import triton_cache_write

        return triton_cache_write.write_tokens(pages.latent, latent, rotary_key, slot)
    write_tokens(pages.latent, torch.cat([latent, rotary_key], dim=-1), slot)


def write_tokens(pages: torch.Tensor, values: torch.Tensor, slot: torch.Tensor) -> None:
    """Store values [T, elements] in pages [blocks, tokens per block, elements] at slot [T] int64; -1 is skipped."""
    if values.is_cuda:
        from stepbind.ops import triton_cache_write

        return triton_cache_write.write_tokens(pages, values, None, slot)
    token, block, offset = _places(slot, pages.shape[1])
    pages[block, offset] = values[token].to(pages.dtype)


def _places(slot: torch.Tensor, tokens_per_block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens that have a slot, and the slot's block and offset."""
    token = torch.nonzero(slot >= 0).squeeze(1)
    kept = slot[token]
    return token, kept // tokens_per_block, kept % tokens_per_block
