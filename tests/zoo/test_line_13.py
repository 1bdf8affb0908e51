"""The padded part of an attention output is never written. Guards: RowLayout.flatten and causal_conv start from
zeros, sparse attention writes every token; the kernels, whose memory is not cleared, write zeros for padding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stepbind.caches import KVPages
from stepbind.groups import GroupKind
from stepbind.ops import triton_attention, triton_causal_conv, triton_gated_delta
from stepbind.ops.attention import paged_attention
from stepbind.ops.causal_conv import causal_conv
from stepbind.ops.gated_delta import gated_delta
from stepbind.ops.indexer import choose_tokens
from stepbind.ops.latent_attention import latent_attention, sparse_latent_attention
from stepbind.plan import PagedPlan, Plan, StatePlan
from stepbind.step import Phase
from tests.op_checks import Shape, random_plan
from tests.ops.latent_case import latent_case
from tests.ops.random_caches import (
    CHANNELS,
    HEAD_DIM,
    HEADS_PER_KV,
    KEY_DIM,
    KEY_HEADS,
    KV_HEADS,
    VALUE_DIM,
    VALUE_HEADS,
    WIDTH,
    kv_cache,
    random_case,
    state_cache,
)
from tests.zoo.harness import FILLS


@pytest.mark.parametrize("phase", list(Phase))
def test_outputs_of_padding_tokens_are_zeros(phase: Phase) -> None:
    for seed in range(20):
        case = random_case(seed, GroupKind.ATTENTION, phase)
        assert isinstance(case.group, PagedPlan)
        sizes = case.plan.sizes
        query = torch.randn(sizes.padded_tokens, KV_HEADS * HEADS_PER_KV, HEAD_DIM)
        attended = paged_attention(query, kv_cache(case), case.group, case.plan.shared, sizes, scale=1.0)
        assert (attended[sizes.num_tokens :] == 0).all()

        case = random_case(seed, GroupKind.STATE, phase)
        assert isinstance(case.group, StatePlan)
        sizes = case.plan.sizes
        q, k = (torch.randn(sizes.padded_tokens, KEY_HEADS, KEY_DIM) for _ in range(2))
        v, decay = (
            torch.randn(sizes.padded_tokens, VALUE_HEADS, VALUE_DIM),
            -torch.ones(sizes.padded_tokens, VALUE_HEADS),
        )
        recurrent = state_cache(case).recurrent
        out = gated_delta(q, k, v, decay, -decay, recurrent, case.group, case.plan.shared, sizes)
        assert (out[sizes.num_tokens :] == 0).all()


@pytest.mark.parametrize("phase", list(Phase))
def test_the_convolutions_padding_is_zeros(phase: Phase) -> None:
    for seed in range(20):
        case = random_case(seed, GroupKind.STATE, phase)
        assert isinstance(case.group, StatePlan)
        sizes, conv = case.plan.sizes, state_cache(case).conv
        x, weight = torch.randn(sizes.padded_tokens, CHANNELS), torch.randn(CHANNELS, WIDTH)
        out = causal_conv(x, weight, torch.ones(CHANNELS), conv, case.group, case.plan.shared, silu=True)
        assert (out[sizes.num_tokens :] == 0).all()


def test_latent_attentions_padding_is_zeros() -> None:
    for seed in range(30):
        case = latent_case(seed)
        plan, shared, sizes = case.group_plan, case.plan.shared, case.plan.sizes
        chosen = choose_tokens(case.index_query, case.index_weight, case.index_key, case.top_k, plan, shared, sizes)
        dense = latent_attention(case.query, case.weight, case.pages, plan, shared, sizes, 0.5)
        sparse = sparse_latent_attention(case.query, case.weight, case.pages, chosen, plan, shared, 0.5)
        assert (chosen[sizes.num_tokens :] == -1).all()
        assert (dense[sizes.num_tokens :] == 0).all()
        assert (sparse[sizes.num_tokens :] == 0).all()


@pytest.mark.skipif(True not in FILLS, reason="needs Triton's interpreter")
@pytest.mark.parametrize("phase", list(Phase))
def test_the_gpus_ops_write_the_padding_of_outputs_that_they_do_not_clear(
    phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that torch hands out uncleared is NaN here."""
    real = torch.empty

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        fresh = real(*arguments, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch, "empty", empty)
    shape = Shape()
    plan = padded_plan(GroupKind.ATTENTION, phase, shape)
    paged = plan.groups[0]
    assert isinstance(paged, PagedPlan)
    buffer = torch.zeros(paged.group.num_kernel_blocks, 2, shape.kv_heads, shape.page, shape.head_dim)
    query = torch.randn(plan.sizes.padded_tokens, shape.kv_heads * shape.heads_per_kv, shape.head_dim)
    pages = KVPages(buffer[:, 0], buffer[:, 1])
    out = triton_attention.paged_attention(query, pages, paged, plan.shared, plan.sizes, 1.0)
    assert (out[plan.shared.row_of_token < 0] == 0).all()

    plan = padded_plan(GroupKind.STATE, phase, shape)
    states, tokens = plan.groups[0], plan.sizes.padded_tokens
    assert isinstance(states, StatePlan)
    padding = plan.shared.row_of_token < 0
    x, weight = torch.randn(tokens, shape.channels), torch.randn(shape.channels, shape.width)
    conv = torch.zeros(states.group.num_blocks, shape.width - 1, shape.channels)
    out = triton_causal_conv.causal_conv(x, weight, None, conv, states, plan.shared, True)
    assert (out[padding] == 0).all()
    heads = [torch.randn(tokens, 2, 16) for _ in range(3)]
    recurrent = torch.zeros(states.group.num_blocks, 2, 16, 16)
    rates = (-torch.ones(tokens, 2), torch.ones(tokens, 2))
    out = triton_gated_delta.recurrent_gated_delta(*heads, *rates, recurrent, states, plan.shared, plan.sizes)
    assert (out[padding] == 0).all()


def padded_plan(kind: GroupKind, phase: Phase, shape: Shape) -> Plan:
    """Of few tokens, some of them padding."""
    plans = (random_plan(random.Random(seed), kind, phase, shape) for seed in range(999))
    return next(p for p in plans if p.sizes.num_tokens < 12 and p.sizes.num_tokens < p.sizes.padded_tokens)
