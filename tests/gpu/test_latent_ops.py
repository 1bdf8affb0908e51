"""Latent attention and its indexer on a GPU: the reference's results in every dtype, and nothing that waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepbind.caches import LatentPages
from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops import triton_indexer, triton_latent_attention, triton_top_k
from stepbind.ops.cache_write import write_latent, write_tokens
from stepbind.ops.indexer import choose_tokens, stable_top_k
from stepbind.ops.latent_attention import latent_attention, sparse_latent_attention
from stepbind.plan import PagedPlan, Plan, build_plan, make_arena
from stepbind.step import Lengths, Phase, make_step
from tests.latent_checks import (
    LatentShape,
    check_equal_keys_score_equal,
    check_garbage_touches_nothing_outside,
    check_indexer,
    check_latent_attention,
    check_top_k,
    check_writes,
    whole_row,
)
from tests.op_checks import moved

seeds = st.integers(0, 2**32)
phases = st.sampled_from(Phase)
dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
# Several layouts rather than random ones: each is compiled.
shapes = st.sampled_from(
    (
        LatentShape(),
        LatentShape(page=1, heads=16, rank=32),
        LatentShape(page=64, heads=20, rank=128, rotary_dim=64, index_heads=20, index_dim=64),
    )
)


@settings(max_examples=40)
@given(seeds, phases, dtypes, shapes)
def test_writes_go_to_the_slots_and_nowhere_else(
    seed: int, phase: Phase, dtype: torch.dtype, shape: LatentShape
) -> None:
    check_writes(seed, phase, dataclasses.replace(shape, dtype=dtype), "cuda")


@settings(max_examples=40)
@given(seeds, phases, dtypes, shapes)
def test_latent_attention_equals_the_reference(seed: int, phase: Phase, dtype: torch.dtype, shape: LatentShape) -> None:
    check_latent_attention(seed, phase, dataclasses.replace(shape, dtype=dtype), "cuda")


@settings(max_examples=20)
@given(seeds, dtypes)
def test_contexts_in_one_part_give_the_same(seed: int, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_latent_attention, "PROGRAMS", 1)
        check_latent_attention(seed, Phase.DECODE, LatentShape(dtype=dtype), "cuda")


@settings(max_examples=40)
@given(seeds, phases, dtypes, shapes)
def test_choices_equal_the_reference(seed: int, phase: Phase, dtype: torch.dtype, shape: LatentShape) -> None:
    check_indexer(seed, phase, dataclasses.replace(shape, dtype=dtype), "cuda")


@settings(max_examples=20)
@given(seeds)
def test_blocks_of_tokens_tiles_and_programs_change_no_choice(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_indexer, "MAX_SCORES", 200)
        patch.setattr(triton_indexer, "PROGRAMS", 1)
        patch.setattr(triton_indexer, "TOKENS_AT_ONCE", 2)
        patch.setattr(triton_top_k, "TILE", 16)
        check_indexer(seed, Phase.PREFILL, LatentShape(), "cuda")


@settings(max_examples=20)
@given(seeds, phases, dtypes, st.sampled_from(((7, 24), (64, 128))))
def test_equal_keys_score_equal_in_any_step(
    seed: int, phase: Phase, dtype: torch.dtype, index: tuple[int, int]
) -> None:
    shape = LatentShape(dtype=dtype, index_heads=index[0], index_dim=index[1], longest=30)
    check_equal_keys_score_equal(seed, phase, shape, "cuda")


@settings(max_examples=40)
@given(seeds, phases, dtypes, shapes)
def test_garbage_touches_nothing_outside_of_the_pages(
    seed: int, phase: Phase, dtype: torch.dtype, shape: LatentShape
) -> None:
    check_garbage_touches_nothing_outside(seed, phase, dataclasses.replace(shape, dtype=dtype), "cuda")


@settings(max_examples=40)
@given(st.lists(st.sampled_from([-1.0, 0.0, -0.0, 0.5, 2.0]), min_size=1, max_size=40), st.sampled_from((1, 7, 40)))
def test_the_best_k_are_those_of_a_stable_sort(row: list[float], k: int) -> None:
    check_top_k(row, [value != 2.0 for value in row], k, "cuda")


@pytest.mark.parametrize("tokens", [2048, 2049, 65_536])
@pytest.mark.parametrize("different", [5, 10**6])
def test_the_best_2048_of_long_rows(tokens: int, different: int) -> None:
    """With hardly any different scores, and with hardly any equal ones."""
    torch.manual_seed(0)
    scores = torch.randint(-different, different, (8, tokens)).float() / 7
    plan, count = whole_row(tokens), 2048
    chosen = torch.empty(8, count, dtype=torch.int32, device="cuda")
    triton_top_k.best_positions(chosen, scores.cuda(), tokens - 8, tokens, moved(plan.shared, "cuda"))
    position = torch.arange(tokens)
    allowed = position <= torch.arange(tokens - 8, tokens)[:, None]
    assert torch.equal(chosen.cpu(), stable_top_k(scores, allowed, count))


def decode_plan(rows: int, prior: int, context: int) -> tuple[Plan, Lengths]:
    """A decode whose host lengths are bounds, and the rows' lengths before it, which may change on the device."""
    columns = -(-context // 64)
    group = CacheGroup("latent", GroupKind.LATENT, (0,), 64, 64, num_blocks=rows * columns + 1)
    table = torch.randperm(rows * columns, dtype=torch.int32, device="cuda").reshape(rows, columns) + 1
    query_len = Lengths(Lengths.of([1] * rows).host, torch.ones(rows, dtype=torch.int32, device="cuda"))
    prior_len = Lengths(Lengths.of([context - 1] * rows).host, torch.full_like(query_len.device, prior))  # type: ignore[arg-type]
    step = make_step([group], Phase.DECODE, query_len, prior_len, {"latent": table}, lengths_are_bounds=True)
    arena = make_arena([group], max_rows=rows, max_tokens=rows, max_context=context, device="cuda")
    return build_plan(step, arena, strict=False), prior_len


def layer_of(plan: Plan, dtype: torch.dtype) -> Callable[[], tuple[torch.Tensor, ...]]:
    """All latent ops of a small layer with an indexer, on pages that hold numbers."""
    group = plan.groups[0]
    assert isinstance(group, PagedPlan)
    tokens, blocks = plan.sizes.padded_tokens, group.group.num_kernel_blocks

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    pages, keys = LatentPages(randn(blocks, 64, 48)), randn(blocks, 64, 32)
    latent, rotary, key = randn(tokens, 32), randn(tokens, 16), randn(tokens, 32)
    query, weight = randn(tokens, 4, 32), randn(4, 40, 32)
    index_query, index_weight = randn(tokens, 4, 32), torch.randn(tokens, 4, device="cuda")

    def layer() -> tuple[torch.Tensor, ...]:
        write_latent(pages, latent, rotary, group.slot)
        write_tokens(keys, key, group.slot)
        chosen = choose_tokens(index_query, index_weight, keys, 16, group, plan.shared, plan.sizes)
        sparse = sparse_latent_attention(query, weight, pages, chosen, group, plan.shared, 0.2)
        return chosen, sparse, latent_attention(query, weight, pages, group, plan.shared, plan.sizes, 0.2)

    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_waits_for_nothing_and_replays_on_what_changed(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plan, _ = decode_plan(5, 300, 4096)
    layer = layer_of(plan, dtype)
    layer()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    # What a host's next step changes, and what its fill writes of it.
    group = plan.groups[0]
    assert isinstance(group, PagedPlan)
    for value in (plan.shared.prior_len, plan.shared.context_len):
        value[1:3] -= 290
    plan.shared.row_of_token[4] = -1
    group.slot[4] = -1
    wanted = layer()
    graph.replay()
    for got, want in zip(captured, wanted, strict=True):
        assert torch.equal(got, want)
    chosen, sparse, dense = captured
    assert bool((chosen[4] == -1).all())
    assert not sparse[4].any()
    assert not dense[4].any()
