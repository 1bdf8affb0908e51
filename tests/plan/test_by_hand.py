"""Plans with numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from stepbind import (
    BlockFaultError,
    CacheGroup,
    Granularity,
    GroupKind,
    Lengths,
    Phase,
    build_plan,
    make_arena,
    make_step,
)
from stepbind.plan import PagedPlan, Plan, StatePlan

LATENT = CacheGroup("latent", GroupKind.LATENT, (0,), block_size=64, kernel_block_size=16, num_blocks=50)
STATE = CacheGroup("state", GroupKind.STATE, (1,), block_size=8, kernel_block_size=8, num_blocks=50)


def plan_of(
    group: CacheGroup,
    phase: Phase,
    query: list[int],
    prior: list[int],
    table: list[list[int]],
    granularity: Granularity = Granularity.PHYSICAL,
) -> Plan:
    blocks = torch.tensor(table, dtype=torch.int32)
    step = make_step([group], phase, query, prior, {group.name: blocks}, granularity=granularity)
    arena = make_arena([group], max_rows=8, max_tokens=256, max_context=1024)
    return build_plan(step, arena)


def paged(plan: Plan) -> PagedPlan:
    group = plan.groups[0]
    assert isinstance(group, PagedPlan)
    return group


def state(plan: Plan) -> StatePlan:
    group = plan.groups[0]
    assert isinstance(group, StatePlan)
    return group


def test_shared_values_of_a_mixed_prefill() -> None:
    shared = plan_of(STATE, Phase.PREFILL, [3, 1, 10], [0, 8, 7], [[1, -1, -1], [2, 3, -1], [4, 5, 6]]).shared
    assert shared.query_start.tolist() == [0, 3, 4, 14]
    assert shared.context_len.tolist() == [3, 9, 17]
    assert shared.has_prior.tolist() == [False, True, True]
    assert shared.row_of_token.tolist() == [0, 0, 0, 1] + [2] * 10
    assert shared.position.tolist() == [0, 1, 2, 8, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    assert shared.span_start.tolist() == [0, 0, 0, 3] + [4] * 10
    assert shared.span_end.tolist() == list(range(1, 15))
    assert shared.conv_chunk_row.tolist() == [0, 1, 2, 2]
    assert shared.conv_chunk_index.tolist() == [0, 0, 0, 1]


def test_a_kernel_table_is_expanded_from_a_physical_one() -> None:
    plan = paged(plan_of(LATENT, Phase.PREFILL, [70], [0], [[3, 7]]))
    assert plan.block_table.tolist() == [[12, 13, 14, 15, 28]]  # 70 tokens are 5 kernel blocks of 16
    assert plan.physical_table is not None
    assert plan.physical_table.tolist() == [[3, 7]]
    assert plan.slot[[0, 63, 64, 69]].tolist() == [192, 255, 448, 453]  # 3 * 64, ..., 7 * 64, ...


def test_a_physical_table_is_recovered_from_a_kernel_one() -> None:
    kernel = [[12, 13, 14, 15, 28, 29, 30, 31]]
    plan = paged(plan_of(LATENT, Phase.PREFILL, [70], [0], kernel, Granularity.KERNEL))
    assert plan.block_table.tolist() == [[12, 13, 14, 15, 28]]
    assert plan.physical_table is not None
    assert plan.physical_table.tolist() == [[3, 7]]
    assert plan.slot[[0, 63, 64, 69]].tolist() == [192, 255, 448, 453]


def test_a_host_may_have_contexts_on_the_device_in_place_of_prior_lengths() -> None:
    prior, table = Lengths.of([9, 7]), torch.tensor([[4, 5], [6, 7]], dtype=torch.int32)
    there = Lengths(prior.host, torch.tensor([10, 8], dtype=torch.int32))
    step = make_step([STATE], Phase.DECODE, [1, 1], there, {"state": table}, contexts_on_device=True)
    plan = build_plan(step, make_arena([STATE], max_rows=8, max_tokens=8, max_context=64))
    assert (plan.shared.prior_len.tolist(), plan.shared.context_len.tolist()) == ([9, 7], [10, 8])
    assert (state(plan).state_read.tolist(), state(plan).state_write.tolist()) == ([5, 6], [5, 6])


def test_decode_inside_a_block_reads_and_writes_one_slot() -> None:
    plan = state(plan_of(STATE, Phase.DECODE, [1], [9], [[4, 5]]))
    assert (plan.state_read.tolist(), plan.state_write.tolist()) == ([5], [5])


def test_decode_past_a_boundary_reads_the_old_block_and_writes_the_new_one() -> None:
    plan = state(plan_of(STATE, Phase.DECODE, [1], [8], [[4, 5]]))
    assert (plan.state_read.tolist(), plan.state_write.tolist()) == ([4], [5])


def test_a_fresh_row_reads_no_state() -> None:
    plan = state(plan_of(STATE, Phase.PREFILL, [8], [0], [[4]]))
    assert (plan.state_read.tolist(), plan.state_write.tolist()) == ([-1], [4])
    assert plan.snapshots.row.tolist() == []  # the boundary at 8 is the written state itself


def test_snapshots_stand_at_the_boundaries_on_the_way() -> None:
    # 5 tokens before, 21 new: boundaries at 8, 16 and 24, which are 3, 11 and 19 new tokens.
    plan = state(plan_of(STATE, Phase.PREFILL, [21], [5], [[4, -1, 6, 7]]))
    assert (plan.state_read.tolist(), plan.state_write.tolist()) == ([4], [7])
    assert plan.snapshots.offset.tolist() == [3, 11, 19]
    assert plan.snapshots.slot.tolist() == [4, -1, 6]


def test_verify_keeps_one_state_a_token() -> None:
    # 10 tokens before: the drafts' states go to columns 1, 2 and 3.
    plan = state(plan_of(STATE, Phase.VERIFY, [3], [10], [[4, 5, 6, 7]]))
    assert (plan.state_read.tolist(), plan.state_write.tolist()) == ([5], [7])
    assert plan.snapshots.offset.tolist() == [1, 2]
    assert plan.snapshots.slot.tolist() == [5, 6]


@pytest.mark.parametrize("bad", [-1, 0, 50, 2**31 - 1, -7])
def test_a_bad_block_is_named_by_group_and_row(bad: int) -> None:
    with pytest.raises(
        BlockFaultError,
        match=r"block tables: got entries missing or out of range: 1 in group 'state' \(first in row 1\)",
    ):
        plan_of(STATE, Phase.DECODE, [1, 1], [3, 3], [[4], [bad]])


def test_one_reserved_block_of_a_kernel_table_is_ratio_kernel_blocks() -> None:
    """Kernel blocks 0..3 are the reserved physical block 0 here; 4 is the first that somebody can own."""
    with pytest.raises(BlockFaultError):
        plan_of(LATENT, Phase.PREFILL, [5], [0], [[3]], Granularity.KERNEL)
    assert paged(plan_of(LATENT, Phase.PREFILL, [5], [0], [[4]], Granularity.KERNEL)).slot[0] == 64
