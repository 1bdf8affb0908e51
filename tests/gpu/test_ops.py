"""The GPU's ops equal the plain reference on random steps, in every dtype."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepbind.ops import fla_gated_delta, triton_attention
from stepbind.step import Phase
from tests.op_checks import (
    Shape,
    check_attention,
    check_convolution,
    check_delta_decode,
    check_few_rows_linear,
    check_gated_delta,
)

seeds = st.integers(0, 2**32)
phases = st.sampled_from(Phase)
dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
# Several layouts rather than random ones: each is compiled.
shapes = st.sampled_from(
    (Shape(), Shape(head_dim=64, heads_per_kv=1), Shape(head_dim=128, page=64), Shape(head_dim=256, heads_per_kv=8))
)


@settings(max_examples=60)
@given(seeds, phases, dtypes, shapes)
def test_cache_write_and_paged_attention_equal_the_reference(
    seed: int, phase: Phase, dtype: torch.dtype, shape: Shape
) -> None:
    check_attention(seed, phase, dataclasses.replace(shape, dtype=dtype), "cuda")


@settings(max_examples=20)
@given(seeds, dtypes)
def test_decode_with_its_context_in_one_part_is_the_same(seed: int, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "PROGRAMS", 1)
        check_attention(seed, Phase.DECODE, Shape(dtype=dtype), "cuda")


@settings(max_examples=60)
@given(seeds, phases, dtypes)
def test_the_convolution_equals_the_reference(seed: int, phase: Phase, dtype: torch.dtype) -> None:
    check_convolution(seed, phase, Shape(dtype=dtype), "cuda")


@settings(max_examples=60)
@given(seeds, phases, dtypes, st.sampled_from((torch.float32, torch.bfloat16)))
def test_the_gated_delta_rule_equals_the_reference(
    seed: int, phase: Phase, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    check_gated_delta(seed, phase, Shape(dtype=dtype), "cuda", state_dtype=state_dtype)


@pytest.mark.skipif(not fla_gated_delta.is_installed(), reason="needs fla-core")
@settings(max_examples=20)
@given(seeds)
def test_chunked_prefill_equals_the_reference(seed: int) -> None:
    shape = Shape(dtype=torch.bfloat16, key_dim=64, value_dim=64, longest=150)
    check_gated_delta(seed, Phase.PREFILL, shape, "cuda", rule=fla_gated_delta.chunked_gated_delta)


WEIGHTS = (
    (2048, (8192, 32)),
    (2048, (8192, 512, 512)),
    (2048, (6144, 6144)),
    (2048, (2048,)),
    (4096, (2048,)),
    (6144, (2048,)),
    (384, (100, 1, 7)),
)


@pytest.mark.parametrize("shapes", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 2, 4, 29])
def test_few_rows_times_weights_equal_the_exact_products(rows: int, shapes: tuple[int, tuple[int, ...]]) -> None:
    dtype = torch.bfloat16 if rows != 4 else torch.float16
    check_few_rows_linear(rows, rows, shapes[1], shapes[0], dtype, "cuda")


steps_of_a_layer = st.sampled_from((Shape(), Shape(key_heads=4, value_heads=4, key_dim=128, value_dim=128, width=3)))


@settings(max_examples=60)
@given(
    seeds,
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.sampled_from((torch.float32, torch.bfloat16)),
    steps_of_a_layer,
)
def test_the_fused_token_step_equals_its_parts(
    seed: int, dtype: torch.dtype, state_dtype: torch.dtype, shape: Shape
) -> None:
    check_delta_decode(seed, dataclasses.replace(shape, dtype=dtype), "cuda", state_dtype=state_dtype)
