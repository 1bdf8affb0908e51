"""Writing new tokens into paged caches, on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepbind.caches import KVPages
from stepbind.ops import triton_pdl
from stepbind.ops.triton_pdl import wait_for_inputs


def write_kv(pages: KVPages, key: torch.Tensor, value: torch.Tensor, slot: torch.Tensor) -> None:
    """Arguments of `cache_write.write_kv`. One launch, one program a token."""
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    early = triton_pdl.launches_early(key.device)
    _write_kv[(num_tokens,)](
        key,
        value,
        pages.key,
        pages.value,
        slot,
        pages.key.shape[0],
        *key.stride(),
        *value.stride(),
        *pages.key.stride(),
        *pages.value.stride(),
        num_heads,
        head_dim,
        pages.key.shape[2],
        triton.next_power_of_2(num_heads),
        triton.next_power_of_2(head_dim),
        early,
        **triton_pdl.launch_options(early),
    )


def write_tokens(pages: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None, slot: torch.Tensor) -> None:
    """Store first [T, A] and behind it second [T, B], if given, in pages [blocks, tokens per block, A + B or more] at
    slot [T] int64; -1 and slots outside the pages are skipped. One launch, one program a token."""
    if first.shape[0] == 0:
        return
    behind = first if second is None else second
    _write_tokens[(first.shape[0],)](
        first,
        behind,
        pages,
        slot,
        pages.shape[0],
        *first.stride(),
        *behind.stride(),
        *pages.stride(),
        first.shape[1],
        0 if second is None else second.shape[1],
        pages.shape[1],
        triton.next_power_of_2(first.shape[1]),
        triton.next_power_of_2(behind.shape[1]),
    )


@triton.jit
def _write_kv(
    key,
    value,
    key_pages,
    value_pages,
    slot,
    num_blocks,
    key_token,
    key_head,
    key_dim,
    value_token,
    value_head,
    value_dim,
    key_page_block,
    key_page_head,
    key_page_token,
    key_page_dim,
    value_page_block,
    value_page_head,
    value_page_token,
    value_page_dim,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(slot + token)
    block, offset = target // PAGE, target % PAGE
    if (target >= 0) & (block < num_blocks):
        head = tl.arange(0, HEADS)[:, None]
        dim = tl.arange(0, DIMS)[None, :]
        inside = (head < NUM_HEADS) & (dim < HEAD_DIM)
        k = tl.load(key + token * key_token + head * key_head + dim * key_dim, mask=inside)
        v = tl.load(value + token * value_token + head * value_head + dim * value_dim, mask=inside)
        key_at = block * key_page_block + offset * key_page_token + head * key_page_head + dim * key_page_dim
        value_at = block * value_page_block + offset * value_page_token + head * value_page_head + dim * value_page_dim
        tl.store(key_pages + key_at, k.to(key_pages.dtype.element_ty), mask=inside)
        tl.store(value_pages + value_at, v.to(value_pages.dtype.element_ty), mask=inside)


@triton.jit
def _write_tokens(
    first,
    second,
    pages,
    slot,
    num_blocks,
    first_token,
    first_dim,
    second_token,
    second_dim,
    page_block,
    page_token,
    page_dim,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST_DIMS: tl.constexpr,
    SECOND_DIMS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(slot + token)
    block, offset = target // PAGE, target % PAGE
    if (target >= 0) & (block < num_blocks):
        at = pages + block * page_block + offset * page_token
        dim = tl.arange(0, FIRST_DIMS)
        value = tl.load(first + token * first_token + dim * first_dim, mask=dim < FIRST)
        tl.store(at + dim * page_dim, value.to(pages.dtype.element_ty), mask=dim < FIRST)
        if SECOND > 0:
            dim = tl.arange(0, SECOND_DIMS)
            value = tl.load(second + token * second_token + dim * second_dim, mask=dim < SECOND)
            tl.store(at + (FIRST + dim) * page_dim, value.to(pages.dtype.element_ty), mask=dim < SECOND)
