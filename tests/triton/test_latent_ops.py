"""The GPU's latent attention and indexer, in Triton's interpreter, equal the plain reference on random steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepbind.ops import triton_attention_splits, triton_indexer, triton_latent_attention, triton_top_k
from stepbind.step import Phase
from tests.latent_checks import (
    LatentShape,
    check_equal_keys_score_equal,
    check_garbage_touches_nothing_outside,
    check_indexer,
    check_latent_attention,
    check_top_k,
    check_writes,
)

seeds = st.integers(0, 2**32)
phases = st.sampled_from(Phase)
dtypes = st.sampled_from(
    (torch.float32, torch.float16)
)  # not bfloat16: the interpreter multiplies its bits as integers
page_sizes = st.sampled_from((1, 3, 16))


@settings(max_examples=10)
@given(seeds, phases, st.sampled_from((torch.float32, torch.bfloat16)), page_sizes)
def test_writes_go_to_the_slots_and_nowhere_else(seed: int, phase: Phase, dtype: torch.dtype, page: int) -> None:
    check_writes(seed, phase, LatentShape(dtype=dtype, page=page), "cpu")


@settings(max_examples=6)
@given(seeds, phases, dtypes, page_sizes, st.sampled_from((3, 16, 20)))
def test_latent_attention_equals_the_reference(
    seed: int, phase: Phase, dtype: torch.dtype, page: int, heads: int
) -> None:
    check_latent_attention(seed, phase, LatentShape(dtype=dtype, page=page, heads=heads), "cpu")


@settings(max_examples=4)
@given(seeds, st.sampled_from((Phase.DECODE, Phase.VERIFY)))
def test_contexts_in_one_part_and_in_many_give_the_same(seed: int, phase: Phase) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_latent_attention, "PROGRAMS", 1)
        check_latent_attention(seed, phase, LatentShape(), "cpu")
        patch.setattr(triton_latent_attention, "PROGRAMS", 10**6)
        patch.setattr(triton_attention_splits, "MERGED_AT_ONCE", 2)
        check_latent_attention(seed, phase, LatentShape(contexts=8), "cpu")


@settings(max_examples=6)
@given(seeds, phases, dtypes, page_sizes)
def test_choices_equal_the_reference(seed: int, phase: Phase, dtype: torch.dtype, page: int) -> None:
    check_indexer(seed, phase, LatentShape(dtype=dtype, page=page), "cpu")


@settings(max_examples=2)
@given(seeds)
def test_blocks_of_tokens_tiles_and_programs_change_no_choice(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_indexer, "MAX_SCORES", 200)
        patch.setattr(triton_indexer, "PROGRAMS", 1)
        patch.setattr(triton_indexer, "TOKENS_AT_ONCE", 2)
        patch.setattr(triton_top_k, "TILE", 16)
        check_indexer(seed, Phase.PREFILL, LatentShape(longest=6, contexts=2), "cpu")


# Not float16: the interpreter's products are a library's, whose sums depend on the place.
@settings(max_examples=6)
@given(seeds, phases)
def test_equal_keys_score_equal_in_any_step(seed: int, phase: Phase) -> None:
    check_equal_keys_score_equal(seed, phase, LatentShape(index_heads=7, index_dim=24), "cpu")


@settings(max_examples=6)
@given(seeds, phases, page_sizes)
def test_garbage_touches_nothing_outside_of_the_pages(seed: int, phase: Phase, page: int) -> None:
    check_garbage_touches_nothing_outside(seed, phase, LatentShape(page=page), "cpu")


scores = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([-1.0, 0.0, -0.0, 0.5, 2.0])


@settings(max_examples=30)
@given(st.lists(st.tuples(scores, st.booleans() | st.just(True)), min_size=1, max_size=40), st.integers(1, 45))
def test_the_best_k_are_those_of_a_stable_sort(row: list[tuple[float, bool]], k: int) -> None:
    check_top_k([value for value, _ in row], [candidate for _, candidate in row], k, "cpu")
