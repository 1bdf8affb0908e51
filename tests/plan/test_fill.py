"""The vectorised fill equals the plain reference on random steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepbind.errors import BlockFaultError, StepError
from stepbind.plan import PagedPlan, Plan, build_plan, check_faults, make_arena
from stepbind.plan.arena import Arena
from stepbind.plan.faults import NO_FAULT_ROW
from stepbind.plan.reference import ReferenceGroup, reference_plan
from stepbind.step import Phase, Step
from tests.random_steps import bounded_step, random_step, steps


def arena_for(step: Step, slack: int = 3) -> Arena:
    return make_arena(
        step.groups,
        max_rows=step.padded_rows + slack,
        max_tokens=step.padded_tokens + slack,
        max_context=max(step.max_context, 1) + slack,
    )


def assert_plan_equals_reference(step: Step, plan: Plan, arena: Arena) -> None:
    expected, shared = reference_plan(step), plan.shared
    for name in [field.name for field in dataclasses.fields(shared) if not field.name.startswith("conv_")]:
        assert getattr(shared, name).tolist() == getattr(expected, name), name
    chunks = zip(shared.conv_chunk_row.tolist(), shared.conv_chunk_index.tolist(), strict=True)
    assert list(chunks) == expected.conv_chunks
    for index, (group_plan, reference) in enumerate(zip(plan.groups, expected.groups, strict=True)):
        assert_group_equals_reference(group_plan, reference)
        count, first_row = arena.faults[index].tolist()
        assert count == reference.faults
        assert first_row == (NO_FAULT_ROW if reference.first_fault_row is None else reference.first_fault_row)
    assert bool(arena.fault_counts.seen[0]) == any(reference.faults for reference in expected.groups)


def assert_group_equals_reference(group_plan: object, reference: ReferenceGroup) -> None:
    if isinstance(group_plan, PagedPlan):
        assert group_plan.slot.tolist() == reference.slot
        assert group_plan.block_table.tolist() == reference.block_table
        if group_plan.physical_table is not None:
            assert group_plan.physical_table.tolist() == reference.physical_table
        return
    assert group_plan.state_read.tolist() == reference.state_read
    assert group_plan.state_write.tolist() == reference.state_write
    snapshots = group_plan.snapshots
    rows, offsets, slots = snapshots.row.tolist(), snapshots.offset.tolist(), snapshots.slot.tolist()
    assert list(zip(rows, offsets, slots, strict=True)) == reference.snapshots


# 2,000 random steps in CI, twenty times as many with --full.
@pytest.mark.parametrize("part", range(4))
def test_the_fill_equals_the_reference_on_random_steps(part: int, request: pytest.FixtureRequest) -> None:
    examples = 500 * (20 if request.config.getoption("--full") else 1)

    @settings(max_examples=examples, derandomize=True)
    @given(st.integers(0, 2**32).map(lambda seed: random_step(4 * seed + part)))
    def check(step: Step) -> None:
        arena = arena_for(step)
        plan = build_plan(step, arena, strict=False)
        assert_plan_equals_reference(step, plan, arena)

    check()


@given(steps())
def test_nothing_of_an_earlier_step_is_left_in_the_buffers(step: Step) -> None:
    arena = arena_for(step)
    for values in (arena.shared, *arena.groups):
        for value in vars(values).values():
            if isinstance(value, torch.Tensor):
                value.fill_(77 if value.dtype is not torch.bool else 1)
    assert_plan_equals_reference(step, build_plan(step, arena, strict=False), arena)


@given(steps(holes=False))
def test_good_tables_have_no_faults(step: Step) -> None:
    arena = arena_for(step)
    build_plan(step, arena, strict=True)
    assert arena.faults[:, 0].tolist() == [0] * len(step.groups)


@given(steps())
def test_strict_raises_exactly_where_the_reference_counts_faults(step: Step) -> None:
    arena = arena_for(step)
    faults = sum(group.faults for group in reference_plan(step).groups)
    if faults:
        with pytest.raises(BlockFaultError, match="entries missing or out of range"):
            build_plan(step, arena)
    else:
        build_plan(step, arena)
    arena.fault_counts.raise_seen()
    check_faults(arena)  # raised once, then forgotten


@given(steps(holes=False))
def test_device_lengths_are_used_where_the_host_has_them(step: Step) -> None:
    device_step = dataclasses.replace(
        step,
        query_len=dataclasses.replace(step.query_len, device=torch.from_numpy(step.query_len.host.copy())),
        prior_len=dataclasses.replace(step.prior_len, device=torch.from_numpy(step.prior_len.host.copy())),
    )
    arena = arena_for(device_step)
    assert_plan_equals_reference(step, build_plan(device_step, arena), arena)


@settings(max_examples=500, derandomize=True)
@given(st.integers(0, 2**32).map(bounded_step))
def test_lengths_known_on_the_device_alone_are_what_is_filled(step: Step) -> None:
    arena = arena_for(step)
    assert_plan_equals_reference(step, build_plan(step, arena, strict=False), arena)


def test_bounds_need_the_values_on_the_device() -> None:
    step = bounded_step(0)
    with pytest.raises(StepError, match=r"query_len\.device: got none, expected the values"):
        dataclasses.replace(step, query_len=dataclasses.replace(step.query_len, device=None))
    with pytest.raises(StepError, match="phase: got prefill with bounds for lengths, expected decode or verify"):
        dataclasses.replace(step, phase=Phase.PREFILL)
