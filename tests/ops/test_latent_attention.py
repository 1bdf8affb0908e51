"""Latent attention: what is written where, and that every form equals the plain reference."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from stepbind.caches import LatentPages
from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops.cache_write import write_latent
from stepbind.ops.latent_attention import (
    absorbed_attention,
    expanded_attention,
    expansion_is_cheaper,
    latent_attention,
    sparse_latent_attention,
)
from stepbind.ops.reference_latent import latent_attention_reference, own_position
from stepbind.plan import build_plan, make_arena
from stepbind.plan.plan import Sizes
from stepbind.step import Phase, make_step
from tests.ops.latent_case import HEADS, NOPE_DIM, RANK, ROTARY_DIM, VALUE_DIM, LatentCase, fill_context, latent_case

SCALE = 0.3
cases = st.integers(0, 2**32).map(latent_case)


def random_choice(case: LatentCase, seed: int) -> torch.Tensor:
    """Some of each token's context, ascending, -1 behind; now and then nothing."""
    rng = random.Random(seed)
    chosen = torch.full((case.query.shape[0], case.top_k), -1, dtype=torch.int32)
    for token in range(chosen.shape[0]):
        length = own_position(case.plan.shared, token) + 1
        count = rng.choice((0, case.top_k, rng.randint(0, case.top_k)))
        picked = sorted(rng.sample(range(length), min(count, length)))
        chosen[token, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
    return chosen


@given(cases)
def test_a_write_stores_at_the_slots_and_nowhere_else(case: LatentCase) -> None:
    slot = case.group_plan.slot
    latent, rotary_key = torch.randn(len(slot), RANK), torch.randn(len(slot), ROTARY_DIM)
    expected = case.pages.latent.clone()
    for token, s in enumerate(slot.tolist()):
        if s >= 0:
            expected.view(-1, RANK + ROTARY_DIM)[s] = torch.cat([latent[token], rotary_key[token]])
    write_latent(case.pages, latent, rotary_key, slot)
    assert torch.equal(case.pages.latent.view(torch.int32), expected.view(torch.int32))


@given(cases)
def test_both_forms_equal_the_reference(case: LatentCase) -> None:
    plan, shared, sizes = case.group_plan, case.plan.shared, case.plan.sizes
    expected = latent_attention_reference(case.query, case.weight, case.pages, plan, shared, SCALE)
    forms = [latent_attention] if sizes.is_dummy else [latent_attention, expanded_attention, absorbed_attention]
    for form in forms:
        out = form(case.query, case.weight, case.pages, plan, shared, sizes, SCALE)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert not out[shared.row_of_token < 0].any()


@given(cases, st.integers(0, 2**32))
def test_sparse_attention_equals_the_reference_and_reads_nothing_else(case: LatentCase, seed: int) -> None:
    plan, shared, chosen = case.group_plan, case.plan.shared, random_choice(case, seed)
    positions = [[p for p in row if p >= 0] for row in chosen.tolist()]
    expected = latent_attention_reference(case.query, case.weight, case.pages, plan, shared, SCALE, positions)
    size = plan.group.kernel_block_size
    unread = torch.ones(case.pages.latent.shape[:2], dtype=torch.bool)
    for token, row in enumerate(shared.row_of_token.tolist()):
        for p in positions[token]:
            unread[plan.block_table[row, p // size], p % size] = False
    case.pages.latent[unread] = torch.nan
    out = sparse_latent_attention(case.query, case.weight, case.pages, chosen, plan, shared, SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@given(cases)
def test_choosing_everything_equals_dense_attention(case: LatentCase) -> None:
    plan, shared, sizes = case.group_plan, case.plan.shared, case.plan.sizes
    position = torch.arange(max(sizes.max_context, 1), dtype=torch.int32)
    last = torch.tensor([own_position(shared, token) for token in range(case.query.shape[0])])
    everything = torch.where(position <= last[:, None], position, -1)
    torch.testing.assert_close(
        sparse_latent_attention(case.query, case.weight, case.pages, everything, plan, shared, SCALE),
        latent_attention(case.query, case.weight, case.pages, plan, shared, sizes, SCALE),
        rtol=1e-4,
        atol=1e-5,
    )


def test_blocks_of_queries_and_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in map(latent_case, range(1000)) if c.plan.sizes.max_query > 8 and c.top_k == 5)
    plan, shared, sizes, chosen = case.group_plan, case.plan.shared, case.plan.sizes, random_choice(case, 0)

    def run() -> tuple[torch.Tensor, ...]:
        dense = (case.query, case.weight, case.pages, plan, shared, sizes, SCALE)
        sparse = sparse_latent_attention(case.query, case.weight, case.pages, chosen, plan, shared, SCALE)
        return expanded_attention(*dense), absorbed_attention(*dense), sparse

    whole = run()
    monkeypatch.setattr("stepbind.ops.attention.MAX_SCORES", 1)
    monkeypatch.setattr("stepbind.ops.latent_attention.MAX_GATHERED", 100)
    torch.testing.assert_close(run(), whole)


def sizes_of(phase: Phase, query: int, context: int) -> Sizes:
    query_len, prior_len = np.array([query], dtype=np.int32), np.array([context - query], dtype=np.int32)
    return Sizes(phase, 1, query, 1, query, query, context, False, query_len, prior_len)


def test_a_decode_is_absorbed_and_a_prefill_expanded_at_the_sizes_of_deepseek_v3() -> None:
    query, weight = torch.empty(1, 128, 192, device="meta"), torch.empty(128, 256, 512, device="meta")
    pages = LatentPages(torch.empty(1, 64, 576, device="meta"))
    for context in (2, 100, 100_000):
        assert not expansion_is_cheaper(query, weight, pages, sizes_of(Phase.DECODE, 1, context))
    assert expansion_is_cheaper(query, weight, pages, sizes_of(Phase.PREFILL, 4096, 4096))
    assert not expansion_is_cheaper(query, weight, pages, sizes_of(Phase.PREFILL, 16, 4096))
    # 512 * 256 a context token against 576 + 512 - 192 - 128 saved a pair: even at 170.7 queries of a long context.
    assert not expansion_is_cheaper(query, weight, pages, sizes_of(Phase.PREFILL, 170, 2**30))
    assert expansion_is_cheaper(query, weight, pages, sizes_of(Phase.PREFILL, 171, 2**30))


class ElementsMade(TorchDispatchMode):
    """Counts the elements that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += out.numel() if isinstance(out, torch.Tensor) else 0
        return out


def decode_case(context: int, top_k: int) -> LatentCase:
    """One row that decodes after `context` - 1 tokens."""
    columns = -(-context // 16)
    group = CacheGroup("latent", GroupKind.LATENT, (0,), 16, 16, num_blocks=columns + 1)
    step = make_step(
        [group], Phase.DECODE, [1], [context - 1], {"latent": torch.arange(1, columns + 1, dtype=torch.int32)[None]}
    )
    plan = build_plan(step, make_arena([group], max_rows=1, max_tokens=1, max_context=context))
    pages = LatentPages(torch.zeros(columns + 1, 16, RANK + ROTARY_DIM), torch.zeros(columns + 1, 16, 4))
    query, weight = torch.randn(1, HEADS, NOPE_DIM + ROTARY_DIM), torch.randn(HEADS, NOPE_DIM + VALUE_DIM, RANK)
    case = LatentCase(plan, pages, query, weight, torch.zeros(1, HEADS, 4), torch.zeros(1, HEADS), top_k)
    fill_context(case)
    return case


def work_of_sparse_decode(context: int, top_k: int) -> int:
    case = decode_case(context, top_k)
    chosen = torch.arange(0, context, context // top_k, dtype=torch.int32)[None, :top_k]
    with ElementsMade() as made:
        sparse_latent_attention(case.query, case.weight, case.pages, chosen, case.group_plan, case.plan.shared, SCALE)
    return made.count


def test_the_work_of_a_sparse_decode_grows_with_k_and_not_with_the_context() -> None:
    assert work_of_sparse_decode(5_000, 32) == work_of_sparse_decode(100, 32)
    assert work_of_sparse_decode(5_000, 64) > work_of_sparse_decode(5_000, 32)


def test_addresses_are_64_bit() -> None:
    size, elements = 64, RANK + ROTARY_DIM
    num_blocks = 2**31 // (size * elements) + 2  # the last block starts past element 2^31
    group = CacheGroup("latent", GroupKind.LATENT, (0,), size, size, num_blocks)
    step = make_step([group], Phase.DECODE, [1], [0], {"latent": torch.tensor([[num_blocks - 1]], dtype=torch.int32)})
    plan = build_plan(step, make_arena([group], max_rows=1, max_tokens=1, max_context=64))
    group_plan = plan.groups[0]
    pages = LatentPages(torch.empty(num_blocks, size, elements, dtype=torch.int8))  # 2 GiB, one page of it touched
    write_latent(pages, torch.full((1, RANK), 3.0), torch.full((1, ROTARY_DIM), 5.0), group_plan.slot)
    assert pages.latent[num_blocks - 1, 0].tolist() == [3] * RANK + [5] * ROTARY_DIM
    query, weight = torch.ones(1, 1, NOPE_DIM + ROTARY_DIM), torch.ones(1, NOPE_DIM + VALUE_DIM, RANK)
    chosen = torch.zeros(1, 1, dtype=torch.int32)
    sparse = sparse_latent_attention(query, weight, pages, chosen, group_plan, plan.shared, SCALE)
    dense = latent_attention(query, weight, pages, group_plan, plan.shared, plan.sizes, SCALE)
    # One token attends to itself alone: its value, 6 latent elements of 3 weighted 1.
    assert sparse.flatten().tolist() == dense.flatten().tolist() == [18.0] * VALUE_DIM
