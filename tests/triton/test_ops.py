"""The GPU's ops, in Triton's interpreter, equal the plain reference on random steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepbind.caches import KVPages
from stepbind.ops import fla_gated_delta, triton_attention, triton_attention_splits, triton_linear
from stepbind.step import Phase
from tests.chunk_stand_in import chunk_gated_delta_rule
from tests.garbage_checks import check_delta_decode_garbage, check_paged_garbage, check_state_garbage
from tests.gpu import memcheck
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
dtypes = st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16))
SMALL = Shape(longest=8, key_heads=1, value_heads=2)  # the interpreter takes every token of every head on its own


@pytest.mark.parametrize(
    ("query", "page", "head_dim", "shared_bytes", "stages"),
    [
        (torch.bfloat16, torch.bfloat16, 256, 227 * 1024, 5),
        (torch.bfloat16, torch.bfloat16, 256, 99 * 1024, 5),
        (torch.bfloat16, torch.bfloat16, 512, 99 * 1024, 3),
        (torch.bfloat16, torch.bfloat16, 128, 64 * 1024, 3),
        (torch.bfloat16, torch.float32, 256, 227 * 1024, 1),
        (torch.float32, torch.float32, 128, 227 * 1024, 1),
    ],
)
def test_decode_keeps_as_many_tiles_under_way_as_the_shared_memory_holds(
    query: torch.dtype, page: torch.dtype, head_dim: int, shared_bytes: int, stages: int
) -> None:
    pages = KVPages(torch.empty(1, 1, 16, head_dim, dtype=page), torch.empty(1, 1, 16, head_dim, dtype=page))
    elements = triton_attention.tile_tokens(head_dim) * head_dim
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "shared_memory_bytes", lambda device: shared_bytes)
        assert triton_attention._stages(torch.empty(1, dtype=query), pages, elements) == stages


# Not bfloat16: the interpreter multiplies its bits as integers.
@settings(max_examples=20)
@given(seeds, phases, st.sampled_from((torch.float32, torch.float16)))
def test_cache_write_and_paged_attention_equal_the_reference(seed: int, phase: Phase, dtype: torch.dtype) -> None:
    check_attention(seed, phase, Shape(dtype=dtype), "cpu")


@settings(max_examples=15)
@given(seeds)
def test_decode_with_its_context_in_one_part_is_the_same(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "PROGRAMS", 1)
        check_attention(seed, Phase.DECODE, Shape(), "cpu")


@settings(max_examples=6)
@given(seeds)
def test_decode_merges_many_parts(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "PROGRAMS", 10**6)
        patch.setattr(triton_attention_splits, "MERGED_AT_ONCE", 2)
        check_attention(seed, Phase.DECODE, Shape(contexts=20), "cpu")


@settings(max_examples=30)
@given(seeds, phases, dtypes)
def test_the_convolution_equals_the_reference(seed: int, phase: Phase, dtype: torch.dtype) -> None:
    check_convolution(seed, phase, Shape(dtype=dtype), "cpu")


@settings(max_examples=20)
@given(seeds, phases, dtypes, st.sampled_from((torch.float32, torch.bfloat16)))
def test_the_gated_delta_rule_equals_the_reference(
    seed: int, phase: Phase, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    shape = dataclasses.replace(SMALL, dtype=dtype)
    check_gated_delta(seed, phase, shape, "cpu", state_dtype=state_dtype)


@settings(max_examples=12)
@given(seeds)
def test_the_rounds_of_chunked_prefill_equal_the_reference(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla_gated_delta, "_chunk_function", lambda: chunk_gated_delta_rule)
        rule = fla_gated_delta.chunked_gated_delta
        check_gated_delta(seed, Phase.PREFILL, dataclasses.replace(SMALL, longest=40), "cpu", rule=rule)


some_widths = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)


@settings(max_examples=5)
@given(seeds, some_widths, st.integers(1, 10), dtypes)
def test_one_row_times_small_weights_equals_the_exact_products(
    seed: int, widths: tuple[int, ...], sixteenths: int, dtype: torch.dtype
) -> None:
    check_few_rows_linear(seed, 1, widths, 16 * sixteenths, dtype, "cpu")


@settings(max_examples=3)
@given(seeds, st.sampled_from((2048, 4096, 6144)))
def test_one_row_times_long_weights(seed: int, length: int) -> None:
    check_few_rows_linear(seed, 1, (71, 8), length, torch.bfloat16, "cpu")


@settings(max_examples=5)
@given(seeds, st.integers(2, 32), some_widths, st.integers(1, 4))
def test_few_rows_times_small_weights_by_matrix_units(
    seed: int, rows: int, widths: tuple[int, ...], steps: int
) -> None:
    check_few_rows_linear(seed, rows, widths, 128 * steps, torch.float16, "cpu")


@settings(max_examples=2)
@given(seeds, st.integers(2, 32), st.sampled_from((((2000, 40), 512), ((4096, 7, 500), 256), ((6000, 5800), 128))))
def test_few_rows_by_matrix_units_with_and_without_split_sums(
    seed: int, rows: int, shapes: tuple[tuple[int, ...], int]
) -> None:
    check_few_rows_linear(seed, rows, *shapes, torch.float16, "cpu")


def test_33_rows_and_weights_with_too_many_split_tiles_share_no_launch() -> None:
    assert triton_linear.serves_together(32, (8192, 512, 512), 2048)
    assert not triton_linear.serves_together(33, (8192, 512, 512), 2048)
    assert not triton_linear.serves_together(32, (2048, 2048, 2048, 2048, 2048), 2048)
    assert triton_linear.serves_together(1, (2048, 2048, 2048, 2048, 2048), 2048)


@settings(max_examples=20)
@given(seeds, dtypes, st.sampled_from((torch.float32, torch.bfloat16)), st.sampled_from((2, 3, 4)))
def test_the_fused_token_step_equals_its_parts(
    seed: int, dtype: torch.dtype, state_dtype: torch.dtype, width: int
) -> None:
    shape = dataclasses.replace(SMALL, dtype=dtype, width=width)
    check_delta_decode(seed, shape, "cpu", state_dtype=state_dtype)


@settings(max_examples=8)
@given(seeds, phases)
def test_garbage_reads_and_writes_nothing_outside_of_the_pages(seed: int, phase: Phase) -> None:
    check_paged_garbage(seed, phase, Shape(), "cpu")


@settings(max_examples=8)
@given(seeds, phases)
def test_garbage_reads_and_writes_nothing_outside_of_the_states(seed: int, phase: Phase) -> None:
    check_state_garbage(seed, phase, SMALL, "cpu")
    check_delta_decode_garbage(seed, SMALL, "cpu")


@pytest.mark.full
def test_what_memcheck_watches_runs() -> None:
    memcheck.check_all("cpu", 1)
