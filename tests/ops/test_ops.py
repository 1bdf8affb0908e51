"""Each op equals its plain reference on random steps, touches nothing that is not its own, and ignores padding.

Every cache is NaN except where the step may read, so that a stray read shows in the output and a stray write in the
comparison of the whole cache.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from stepbind.caches import KVPages, StateSlots
from stepbind.groups import GroupKind
from stepbind.ops import attention
from stepbind.ops.attention import paged_attention
from stepbind.ops.cache_write import write_kv
from stepbind.ops.causal_conv import causal_conv
from stepbind.ops.gated_delta import gated_delta
from stepbind.ops.reference import causal_conv_reference, gated_delta_reference, paged_attention_reference
from stepbind.plan import PagedPlan, StatePlan
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
    Case,
    assert_same,
    kv_cache,
    random_case,
    state_cache,
)

seeds = st.integers(0, 2**32)


def attend(case: Case, pages: KVPages) -> torch.Tensor:
    plan, group = case.plan, case.group
    assert isinstance(group, PagedPlan)
    tokens = plan.sizes.padded_tokens
    query = torch.randn(tokens, KV_HEADS * HEADS_PER_KV, HEAD_DIM)
    write_kv(pages, torch.randn(tokens, KV_HEADS, HEAD_DIM), torch.randn(tokens, KV_HEADS, HEAD_DIM), group.slot)
    out = paged_attention(query, pages, group, plan.shared, plan.sizes, scale=0.3)
    assert_same(out, paged_attention_reference(query, pages, group, plan.shared, scale=0.3))
    return out


@given(seeds)
def test_paged_attention_equals_the_reference(seed: int) -> None:
    case = random_case(seed, GroupKind.ATTENTION)
    out = attend(case, kv_cache(case))
    assert out.isfinite().all()
    assert (out[case.plan.sizes.num_tokens :] == 0).all()


@given(seeds)
def test_paged_attention_in_small_blocks_of_queries_is_the_same(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_SCORES", 64)
        case = random_case(seed, GroupKind.ATTENTION)
        attend(case, kv_cache(case))


@given(seeds)
def test_a_cache_write_stores_each_token_at_its_slot_and_nothing_else(seed: int) -> None:
    case = random_case(seed, GroupKind.ATTENTION)
    assert isinstance(case.group, PagedPlan)
    pages = kv_cache(case)
    expected_key, expected_value = pages.key.clone(), pages.value.clone()
    key, value = (torch.randn(case.plan.sizes.padded_tokens, KV_HEADS, HEAD_DIM) for _ in range(2))
    size = pages.key.shape[2]
    for token, slot in enumerate(case.group.slot.tolist()):
        if slot >= 0:
            expected_key[slot // size, :, slot % size] = key[token]
            expected_value[slot // size, :, slot % size] = value[token]
    write_kv(pages, key, value, case.group.slot)
    torch.testing.assert_close(pages.key, expected_key, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(pages.value, expected_value, equal_nan=True, atol=0, rtol=0)


@given(seeds, st.booleans())
def test_the_convolution_equals_the_reference(seed: int, with_bias: bool) -> None:
    case = random_case(seed, GroupKind.STATE)
    assert isinstance(case.group, StatePlan)
    slots, again = twice(state_cache(case))
    x = torch.randn(case.plan.sizes.padded_tokens, CHANNELS)
    weight, bias = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS) if with_bias else None
    out = causal_conv(x, weight, bias, slots.conv, case.group, case.plan.shared)
    assert_same(out, causal_conv_reference(x, weight, bias, again.conv, case.group, case.plan.shared))
    assert_same(slots.conv, again.conv)
    assert out.isfinite().all()
    assert (out[case.plan.sizes.num_tokens :] == 0).all()


@given(seeds)
@example(310)
def test_the_gated_delta_rule_equals_the_reference(seed: int) -> None:
    case = random_case(seed, GroupKind.STATE)
    assert isinstance(case.group, StatePlan)
    slots, again = twice(state_cache(case))
    tokens = case.plan.sizes.padded_tokens
    inputs = (
        torch.randn(tokens, KEY_HEADS, KEY_DIM),
        torch.randn(tokens, KEY_HEADS, KEY_DIM),
        torch.randn(tokens, VALUE_HEADS, VALUE_DIM),
        -torch.rand(tokens, VALUE_HEADS) * torch.tensor([0.01, 0.3, 1.0, 8.0]),  # long and short memories
        torch.rand(tokens, VALUE_HEADS) * 2,
    )
    out = gated_delta(*inputs, slots.recurrent, case.group, case.plan.shared, case.plan.sizes)
    # A state carries its rounding from token to token.
    assert_same(out, gated_delta_reference(*inputs, again.recurrent, case.group, case.plan.shared), rounding=1e-4)
    assert_same(slots.recurrent, again.recurrent, rounding=1e-4)
    assert out.isfinite().all()
    assert (out[case.plan.sizes.num_tokens :] == 0).all()


def twice(slots: StateSlots) -> tuple[StateSlots, StateSlots]:
    return slots, StateSlots(slots.recurrent.clone(), slots.conv.clone())
