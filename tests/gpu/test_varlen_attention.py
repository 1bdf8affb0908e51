"""torch's own varlen attention on a GPU: equal to the reference, wherever a table leads, and without waiting."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepbind.caches import KVPages
from stepbind.ops import varlen_attention
from tests.gpu.test_no_waiting import no_waiting
from tests.op_checks import Shape, moved
from tests.varlen_checks import check_varlen_attention, random_pass

shapes = st.sampled_from(
    (Shape(head_dim=64, heads_per_kv=1), Shape(head_dim=128, longest=150), Shape(head_dim=256, heads_per_kv=8))
)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from(varlen_attention.DTYPES), shapes)
def test_it_equals_the_reference_of_paged_attention(seed: int, dtype: torch.dtype, shape: Shape) -> None:
    check_varlen_attention(seed, dataclasses.replace(shape, dtype=dtype), "cuda")


@torch.inference_mode()
@pytest.mark.parametrize("head_dim", [128, 256])
def test_neither_the_choice_nor_the_attention_waits(head_dim: int) -> None:
    given = random_pass(0, Shape(dtype=torch.bfloat16, head_dim=head_dim))
    query, key, value, shared = moved((given.query, given.key, given.value, given.plan.shared), "cuda")
    pages, sizes = KVPages(*moved(tuple(vars(given.pages()).values()), "cuda")), given.plan.sizes
    with patch.dict(varlen_attention.FASTER_FROM, {head_dim: 1}, clear=True):
        for _ in range(2):
            with no_waiting():
                assert varlen_attention.serves(query, key, value, pages, sizes)
                varlen_attention.varlen_attention(query, key, value, shared, sizes, given.scale)
