"""Context length 0 gives NaN in padding rows, and NaN spreads. Guards: attention and latent attention zero
what they gathered but may not read, for 0 * NaN is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepbind import Phase
from stepbind.caches import KVPages
from stepbind.groups import GroupKind
from stepbind.ops.attention import paged_attention
from stepbind.ops.latent_attention import absorbed_attention, expanded_attention
from stepbind.plan import PagedPlan
from tests.ops.latent_case import latent_case
from tests.ops.random_caches import HEAD_DIM, HEADS_PER_KV, KV_HEADS, nan, random_case
from tests.zoo.harness import HandMade, assert_close, tokens


def test_rows_of_no_context_are_finite_beside_live_ones_in_nan_memory() -> None:
    host, prompt = HandMade(), tokens(6)
    host.run([prompt[:5]], [0], [[1]], [[1]])  # the rest of block 1 stays NaN
    logits, plan = host.run([prompt[5:]], [5], [[1]], [[1]], phase=Phase.DECODE, padded_rows=4, padded_tokens=4)
    assert plan.shared.context_len.tolist() == [6, 0, 0, 0]
    assert logits.isfinite().all()
    assert_close(logits[0], host.expected(prompt)[5])


def test_a_row_with_nothing_to_attend_to_gives_zeros() -> None:
    """All blocks of the step are missing: no token has anything to attend to, padding or not."""
    case = random_case(3, GroupKind.ATTENTION)
    assert isinstance(case.group, PagedPlan)
    case.group.block_table.fill_(-1)
    pages = nan(4, 2, KV_HEADS, case.group.group.kernel_block_size, HEAD_DIM)
    query = torch.randn(case.plan.sizes.padded_tokens, KV_HEADS * HEADS_PER_KV, HEAD_DIM)
    out = paged_attention(
        query, KVPages(pages[:, 0], pages[:, 1]), case.group, case.plan.shared, case.plan.sizes, scale=1.0
    )
    assert (out == 0).all()


@pytest.mark.parametrize("attend", [expanded_attention, absorbed_attention])
def test_latent_attention_of_no_context_is_zero_beside_live_rows_in_nan_memory(attend: Any) -> None:
    """Pages are NaN wherever no row's context is, in the tails of the rows' own blocks too."""
    for seed in range(30):
        case = latent_case(seed)
        shared, sizes = case.plan.shared, case.plan.sizes
        if sizes.is_dummy:
            continue
        out = attend(case.query, case.weight, case.pages, case.group_plan, shared, sizes, 0.5)
        assert out.isfinite().all()
        assert (out[shared.row_of_token < 0] == 0).all()
