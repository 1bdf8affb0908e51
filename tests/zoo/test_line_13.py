"""The padded part of an attention output is never written. Guard: RowLayout.flatten starts from zeros."""

from __future__ import annotations

import pytest
import torch

from stepbind.groups import GroupKind
from stepbind.ops.attention import paged_attention
from stepbind.ops.gated_delta import gated_delta
from stepbind.plan import PagedPlan, StatePlan
from stepbind.step import Phase
from tests.ops.random_caches import (
    HEAD_DIM,
    HEADS_PER_KV,
    KEY_DIM,
    KEY_HEADS,
    KV_HEADS,
    VALUE_DIM,
    VALUE_HEADS,
    kv_cache,
    random_case,
    state_cache,
)


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
