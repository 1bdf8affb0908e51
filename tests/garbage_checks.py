"""The GPU's ops on tables and slots of arbitrary numbers: nothing outside of the cache is read or written.

A fill lets no such number through; the ops do not rely on it. Caches lie between NaN, in which a stray read shows in
what comes out and a stray write in what stands there. Rows may share blocks, so values are held to bounds alone.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from stepbind.caches import KVPages, StateSlots
from stepbind.groups import GroupKind
from stepbind.ops import (
    triton_attention,
    triton_cache_write,
    triton_causal_conv,
    triton_delta_decode,
    triton_gated_delta,
)
from stepbind.ops.decay import Decay
from stepbind.ops.delta_decode import DeltaWeights
from stepbind.plan import PagedPlan, Plan, StatePlan
from stepbind.step import Phase
from tests.op_checks import Shape, moved, nan, normal, random_plan


def garbage(like: torch.Tensor, limit: int) -> torch.Tensor:
    """Numbers of which many are negative, beyond `limit` or the largest that 32 bits hold."""
    rubbish = torch.randint(-3, 2 * limit, like.shape).to(like.dtype)
    return torch.where(torch.rand(like.shape) < 0.2, torch.iinfo(torch.int32).max, rubbish).to(like.dtype)


class Guarded:
    """A cache of ones [blocks, *shape] in the middle of a buffer of NaN."""

    def __init__(self, blocks: int, *shape: int, dtype: torch.dtype, device: str) -> None:
        self.buffer = nan(3 * blocks, *shape, dtype=dtype).to(device)
        self.cache = self.buffer[blocks : 2 * blocks].fill_(1)

    def check(self, largest: float) -> None:
        blocks = self.cache.shape[0]
        assert bool((self.cache.abs() <= largest).all())
        assert bool(self.buffer[:blocks].isnan().all() & self.buffer[2 * blocks :].isnan().all())


def check_paged_garbage(seed: int, phase: Phase, shape: Shape, device: str) -> None:
    """Keys and values of ones: attention gives ones, or zeros where a token has nothing to attend to."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plan = random_plan(rng, GroupKind.ATTENTION, phase, shape)
    group = plan.groups[0]
    assert isinstance(group, PagedPlan)
    blocks, tokens = group.group.num_kernel_blocks, plan.sizes.padded_tokens
    table, slot = garbage(group.block_table, blocks), garbage(group.slot, blocks * shape.page)
    group = moved(replace(group, block_table=table, slot=slot), device)
    guarded = Guarded(blocks, 2, shape.kv_heads, shape.page, shape.head_dim, dtype=shape.dtype, device=device)
    pages = KVPages(guarded.cache[:, 0], guarded.cache[:, 1])
    ones = torch.ones(tokens, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
    triton_cache_write.write_kv(pages, ones, ones, group.slot)
    query = normal(tokens, shape.kv_heads * shape.heads_per_kv, shape.head_dim, dtype=shape.dtype).to(device)
    out = triton_attention.paged_attention(query, pages, group, moved(plan.shared, device), plan.sizes, 0.1)
    assert bool((((out - 1).abs() < 0.02) | (out == 0)).all())
    guarded.check(1)


def check_state_garbage(seed: int, phase: Phase, shape: Shape, device: str) -> None:
    """Convolution and delta rule, with snapshots."""
    plan, group = _state_garbage(seed, phase, shape, device)
    blocks, tokens, width = group.group.num_blocks, plan.sizes.padded_tokens, shape.width
    shared = moved(plan.shared, device)
    conv = Guarded(blocks, width - 1, shape.channels, dtype=shape.dtype, device=device)
    x, weight = (
        torch.ones(n, m, dtype=shape.dtype, device=device)
        for n, m in ((tokens, shape.channels), (shape.channels, width))
    )
    out = triton_causal_conv.causal_conv(x, weight, None, conv.cache, group, shared, False)
    assert bool((out.abs() <= width).all())
    conv.check(1)

    state = Guarded(blocks, shape.value_heads, shape.value_dim, shape.key_dim, dtype=torch.float32, device=device)
    query, key = (normal(tokens, shape.key_heads, shape.key_dim, dtype=shape.dtype).to(device) for _ in range(2))
    value = torch.ones(tokens, shape.value_heads, shape.value_dim, dtype=shape.dtype, device=device)
    beta = torch.ones(tokens, shape.value_heads, dtype=shape.dtype, device=device)
    decay = _decay(tokens, shape, device)
    out = triton_gated_delta.recurrent_gated_delta(
        query, key, value, decay, beta, state.cache, group, shared, plan.sizes
    )
    assert bool(out.isfinite().all())
    state.check(1e3)


def check_delta_decode_garbage(seed: int, shape: Shape, device: str) -> None:
    plan, group = _state_garbage(seed, Phase.DECODE, shape, device)
    blocks, tokens = group.group.num_blocks, plan.sizes.padded_tokens
    channels = 2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim
    state = Guarded(blocks, shape.value_heads, shape.value_dim, shape.key_dim, dtype=torch.float32, device=device)
    conv = Guarded(blocks, shape.width - 1, channels, dtype=shape.dtype, device=device)
    heads = ((shape.key_heads, shape.key_dim),) * 2 + ((shape.value_heads, shape.value_dim),) * 2
    query, key, value, gate = (normal(tokens, *sizes, dtype=shape.dtype).clamp(-1, 1).to(device) for sizes in heads)
    a, b = (normal(tokens, shape.value_heads, dtype=shape.dtype).to(device) for _ in range(2))
    decay = _decay(tokens, shape, device)
    weights = DeltaWeights(
        conv=torch.ones(channels, shape.width, dtype=shape.dtype, device=device),
        conv_bias=None,
        A_log=decay.A_log,
        dt_bias=decay.dt_bias,
        norm=torch.ones(shape.value_dim, dtype=shape.dtype, device=device),
        norm_eps=1e-2,
        beta_scale=1.0,
    )
    out = triton_delta_decode.delta_decode(
        query, key, value, gate, a, b, weights, StateSlots(state.cache, conv.cache), group, moved(plan.shared, device)
    )
    assert bool(out.isfinite().all())
    state.check(1e3)
    conv.check(1)


def _state_garbage(seed: int, phase: Phase, shape: Shape, device: str) -> tuple[Plan, StatePlan]:
    torch.manual_seed(seed)
    plan = random_plan(random.Random(seed), GroupKind.STATE, phase, shape)
    group = plan.groups[0]
    assert isinstance(group, StatePlan)
    limit = group.group.num_blocks
    snapshots = replace(group.snapshots, slot=garbage(group.snapshots.slot, limit))
    read, write = garbage(group.state_read, limit), garbage(group.state_write, limit)
    there: Any = moved(replace(group, state_read=read, state_write=write, snapshots=snapshots), device)
    return plan, there


def _decay(tokens: int, shape: Shape, device: str) -> Decay:
    a = normal(tokens, shape.value_heads, dtype=shape.dtype).to(device)
    return Decay(a, torch.rand(shape.value_heads, device=device), torch.randn(shape.value_heads, device=device))
