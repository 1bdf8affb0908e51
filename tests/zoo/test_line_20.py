"""Zoo line 20: graph chosen by batch size alone although it baked in something that depends on length (aprender 2030).

What a captured pass bakes in of a length is the width of its tables and `max_context`, and both are upper bounds: a
pass captured at the arena's width gives every shorter context the numbers of a plan made for it, though the columns
behind a row's own hold what an earlier, longer pass left there. A longer context than that is refused.

Checked by taking out, one at a time: `& (position < shared.context_len[:, None])` in `gather_context` of
ops/latent_attention.py, the same in ops/attention.py, the end of a context in `context_of` of
ops/triton_attention_splits.py, the `max_context` line of `check_fits` in plan/arena.py, and the limit in
RtpBinding.check_replay.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from stepbind.caches import KVPages
from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops import triton_attention
from stepbind.ops.attention import paged_attention
from stepbind.ops.indexer import choose_tokens
from stepbind.ops.latent_attention import absorbed_attention, expanded_attention, sparse_latent_attention
from stepbind.ops.reference import paged_attention_reference
from stepbind.plan import PagedPlan, Plan, build_plan, make_arena
from stepbind.plan.arena import Arena
from stepbind.step import Phase, Step, make_step
from tests.hosts.rtp_double.by_hand import Host
from tests.hosts.rtp_double.graphs import GraphRunner
from tests.hosts.rtp_double.inputs import GENERATIONS, Row
from tests.ops.latent_case import (
    HEADS,
    INDEX_DIM,
    NOPE_DIM,
    RANK,
    ROTARY_DIM,
    VALUE_DIM,
    LatentCase,
    fill_context,
    nan_pages,
    small_integers,
)
from tests.zoo.harness import FILLS

GROUP = CacheGroup("latent", GroupKind.LATENT, (0,), block_size=8, kernel_block_size=4, num_blocks=40)
TOP_K = 6


def decode(contexts: list[int], first_block: int) -> Step:
    blocks = torch.arange(first_block, first_block + 8 * len(contexts), dtype=torch.int32).reshape(-1, 8)
    return make_step([GROUP], Phase.DECODE, [1] * len(contexts), [c - 1 for c in contexts], {"latent": blocks})


def at_full_width(plan: Plan, arena: Arena) -> Plan:
    """The plan as a pass sees it that was captured for the arena's longest context."""
    rows, wide = plan.sizes.padded_rows, arena.groups[0]
    assert isinstance(wide, PagedPlan)
    group_plan = dataclasses.replace(plan.groups[0], block_table=wide.block_table[:rows], physical_table=None)
    sizes = dataclasses.replace(plan.sizes, max_context=arena.max_context)
    return dataclasses.replace(plan, sizes=sizes, groups=(group_plan,))


def results(case: LatentCase) -> list[torch.Tensor]:
    plan, shared, sizes = case.group_plan, case.plan.shared, case.plan.sizes
    chosen = choose_tokens(case.index_query, case.index_weight, case.index_key, TOP_K, plan, shared, sizes)
    dense = (case.query, case.weight, case.pages, plan, shared, sizes, 0.5)
    sparse = sparse_latent_attention(case.query, case.weight, case.pages, chosen, plan, shared, 0.5)
    chosen = torch.nn.functional.pad(chosen, (0, TOP_K - chosen.shape[1]), value=-1)
    return [chosen, sparse, absorbed_attention(*dense), expanded_attention(*dense)]


@pytest.mark.parametrize("contexts", [[1, 1], [3, 17], [8, 5], [33, 64]])
def test_a_pass_as_wide_as_the_arena_serves_every_shorter_context(contexts: list[int]) -> None:
    torch.manual_seed(0)
    arena = make_arena([GROUP], max_rows=2, max_tokens=2, max_context=64)
    build_plan(decode([64, 64], first_block=1), arena)  # an earlier pass in blocks that have other owners by now
    plan = build_plan(decode(contexts, first_block=20), arena)
    case = LatentCase(
        plan=plan,
        pages=nan_pages(GROUP),
        query=torch.randn(2, HEADS, NOPE_DIM + ROTARY_DIM),
        weight=torch.randn(HEADS, NOPE_DIM + VALUE_DIM, RANK),
        index_query=small_integers(2, HEADS, INDEX_DIM),
        index_weight=small_integers(2, HEADS),
        top_k=TOP_K,
    )
    fill_context(case)
    wide = dataclasses.replace(case, plan=at_full_width(plan, arena))
    for got, expected in zip(results(wide), results(case), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert got.isfinite().all()


def test_a_context_longer_than_the_buffers_is_refused() -> None:
    arena = make_arena([GROUP], max_rows=2, max_tokens=2, max_context=32)
    with pytest.raises(StepError, match="max_context: got 33, expected at most the arena's 32"):
        build_plan(decode([5, 33], first_block=20), arena)


ATTENTIONS = [triton_attention.paged_attention if triton else paged_attention for triton in FILLS]
KV_GROUP = CacheGroup("attention", GroupKind.ATTENTION, (0,), block_size=16, kernel_block_size=16, num_blocks=40)


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("contexts", [[1, 1], [3, 17], [16, 5], [33, 64]])
def test_attention_captured_for_the_longest_context_serves_every_shorter_one(contexts: list[int], attend: Any) -> None:
    """Sizes, grids and splits are those of 64 tokens; the columns behind a row's own lead to memory that is NaN."""
    torch.manual_seed(0)
    arena = make_arena([KV_GROUP], max_rows=2, max_tokens=2, max_context=64)
    blocks = torch.arange(20, 28, dtype=torch.int32).reshape(2, 4)
    step = make_step([KV_GROUP], Phase.DECODE, [1, 1], [c - 1 for c in contexts], {"attention": blocks})
    plan = build_plan(step, arena)
    full = arena.groups[0]
    assert isinstance(full, PagedPlan)
    behind = torch.arange(4) >= -(-torch.tensor(contexts)[:, None] // 16)
    full.block_table[behind] = 5
    buffer = torch.full((40, 2, 2, 16, 16), torch.nan)
    for row, context in enumerate(contexts):
        for position in range(context):
            buffer[int(blocks[row, position // 16]), :, :, position % 16] = torch.randn(2, 2, 16)
    pages, query = KVPages(buffer[:, 0], buffer[:, 1]), torch.randn(2, 4, 16)
    sizes = dataclasses.replace(plan.sizes, max_context=64)
    group = dataclasses.replace(full, slot=plan.groups[0].slot)  # type: ignore[union-attr]
    got = attend(query, pages, group, plan.shared, sizes, 0.25)
    want = paged_attention_reference(query, pages, plan.groups[0], plan.shared, 0.25)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_replay_with_a_longer_row_than_its_graph_takes_is_refused(generation: str) -> None:
    """The graph's batch size fits, and one of its rows is a token longer than the buffers that it was captured on."""
    host = Host(generation)
    graphs = GraphRunner(host, host.layout, [2], 128)
    tables = [list(range(1, 17)), list(range(1, 17))]
    with pytest.raises(StepError, match="context of a replayed row: got 129, expected at most 128 tokens"):
        graphs.replay([Row([1], 128, tables), Row([1], 3, tables)])
