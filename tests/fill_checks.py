"""What a Triton-filled plan of a random step must hold, on any device."""

from __future__ import annotations

import dataclasses

import torch

from stepbind.groups import CacheGroup
from stepbind.plan import Arena, PagedPlan, Plan, build_plan, make_arena
from stepbind.step import BlockTable, Lengths, Step
from tests.plan.test_fill import assert_plan_equals_reference


def on_device(step: Step, device: torch.device | str, *, device_lengths: bool) -> Step:
    """The step as a host on `device` would say it, with or without device copies of lengths that it knows."""

    def lengths(of: Lengths) -> Lengths:
        values = of.device if step.lengths_are_bounds else torch.from_numpy(of.host.copy())
        assert values is not None
        keep = device_lengths or step.lengths_are_bounds
        return dataclasses.replace(of, device=values.to(device) if keep else None)

    def table(of: BlockTable) -> BlockTable:
        return dataclasses.replace(of, blocks=of.blocks.to(device))

    return dataclasses.replace(
        step,
        query_len=lengths(step.query_len),
        prior_len=lengths(step.prior_len),
        tables=tuple(table(of) for of in step.tables),
        position=None if step.position is None else step.position.to(device),
    )


def poisoned_arena(step: Step, slack: int = 3) -> Arena:
    """An arena on the step's device, with rubbish in every value and room for more than the step."""
    arena = make_arena(
        step.groups,
        max_rows=step.padded_rows + slack,
        max_tokens=step.padded_tokens + slack,
        max_context=max(step.max_context, 1) + slack,
        device=step.device,
    )
    for values in (arena.shared, *arena.groups, *(g.snapshots for g in arena.groups if not isinstance(g, PagedPlan))):
        for value in vars(values).values():
            if isinstance(value, torch.Tensor):
                value.fill_(77 if value.dtype is not torch.bool else 1)
    return arena


def check_fill(step: Step, arena: Arena) -> None:
    """The Triton fill of a step equals the reference, and wrote nothing outside of the step's part of the arena."""
    plan = build_plan(step, arena, strict=False, triton=True)
    assert_plan_equals_reference(step, _narrowed(step, plan), arena)
    _check_rest_untouched(step, plan, arena)


def _narrowed(step: Step, plan: Plan) -> Plan:
    """The plan with tables as wide as the reference's, and -1 in the columns that say nothing."""

    def cut(table: torch.Tensor, size: int) -> torch.Tensor:
        table = table[:, : -(-step.max_context // size)]
        column = torch.arange(table.shape[1], device=table.device)
        return torch.where(column < -(-plan.shared.context_len[:, None] // size), table, -1)

    def narrow(group_plan: PagedPlan, group: CacheGroup) -> PagedPlan:
        physical = group_plan.physical_table
        return dataclasses.replace(
            group_plan,
            block_table=cut(group_plan.block_table, group.kernel_block_size),
            physical_table=None if physical is None else cut(physical, group.block_size),
        )

    groups = tuple(narrow(g, g.group) if isinstance(g, PagedPlan) else g for g in plan.groups)
    return dataclasses.replace(plan, groups=groups)


def _check_rest_untouched(step: Step, plan: Plan, arena: Arena) -> None:
    for part, full in zip((plan.shared, *plan.groups), (arena.shared, *arena.groups), strict=True):
        for name, value in vars(full).items():
            if not isinstance(value, torch.Tensor) or name.startswith("conv_chunk"):
                continue
            used = getattr(part, name).shape[0]
            assert bool((value[used:] == (77 if value.dtype is not torch.bool else 1)).all()), name
