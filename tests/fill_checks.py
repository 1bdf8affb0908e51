"""What a Triton-filled plan of a random step must hold, on any device."""

from __future__ import annotations

import dataclasses
import random

import torch

from stepbind.groups import CacheGroup, GroupKind
from stepbind.plan import Arena, GroupPlan, PagedPlan, Plan, build_plan, make_arena
from stepbind.step import BlockTable, Granularity, Lengths, Phase, Step, make_step
from tests.plan.test_fill import assert_plan_equals_reference
from tests.random_steps import random_table


def on_device(step: Step, device: torch.device | str, *, device_lengths: bool, contexts: bool = False) -> Step:
    """The step as a host on `device` would say it, with or without device copies of lengths that it knows; with
    `contexts` a decode's are context lengths."""
    contexts &= device_lengths and step.phase is Phase.DECODE and not step.lengths_are_bounds

    def lengths(of: Lengths, add: int = 0) -> Lengths:
        values = of.device if step.lengths_are_bounds else torch.from_numpy(of.host + add)
        assert values is not None
        keep = device_lengths or step.lengths_are_bounds
        return dataclasses.replace(of, device=values.to(device) if keep else None)

    def table(of: BlockTable) -> BlockTable:
        return dataclasses.replace(of, blocks=of.blocks.to(device))

    return dataclasses.replace(
        step,
        query_len=lengths(step.query_len),
        prior_len=lengths(step.prior_len, int(contexts and not step.is_dummy)),
        contexts_on_device=contexts,
        tables=tuple(table(of) for of in step.tables),
        position=None if step.position is None else step.position.to(device),
    )


def with_garbage_tables(step: Step, seed: int) -> Step:
    """The step with every entry of its tables random, -1 or out of range."""
    generator = torch.Generator().manual_seed(seed)

    def table(of: BlockTable) -> BlockTable:
        entries = of.group.num_blocks * (of.group.ratio if of.granularity is Granularity.KERNEL else 1)
        blocks = torch.randint(-3, 2 * entries, of.blocks.shape, generator=generator).clamp(max=2**31 - 1)
        blocks[torch.rand(blocks.shape, generator=generator) < 0.2] = -1
        return dataclasses.replace(of, blocks=blocks.to(of.blocks.dtype))

    return dataclasses.replace(step, tables=tuple(table(of) for of in step.tables))


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


def check_fills_in_a_row(device: torch.device | str, count: int) -> Arena:
    """Fills whose lengths, counts and tables change, queued one after the other with no look at any result: each plan,
    copied behind its fill, equals the reference. Lengths and tables that only the fill reads are let go of at once,
    and other allocations take their memory."""
    rng = random.Random(count)
    groups = (
        CacheGroup("attention", GroupKind.ATTENTION, (0,), 8, 4, 500),
        CacheGroup("latent", GroupKind.LATENT, (1,), 16, 4, 500),
        CacheGroup("state", GroupKind.STATE, (2,), 8, 8, 500),
    )
    arena = make_arena(groups, max_rows=24, max_tokens=24 * 9, max_context=64, device=device)
    blocks = {g.name: random_table(rng, g, 24, 16, Granularity.PHYSICAL, False).to(device) for g in groups}
    filled: list[tuple[Step, Plan]] = []
    for _ in range(count):
        phase, rows = rng.choice(list(Phase)), rng.randint(1, 24)
        most = {Phase.PREFILL: 9, Phase.VERIFY: 3, Phase.DECODE: 1}[phase]
        query, prior = [rng.randint(1, most) for _ in range(rows)], [rng.randint(0, 50) for _ in range(rows)]
        step = make_step(groups, phase, query, prior, {name: of[:rows] for name, of in blocks.items()})
        filled.append((step, _copied(build_plan(_passing(step, rng), arena, strict=False, triton=True))))
        for size in (rows, 4 * rows, 16 * rows):
            torch.full((size,), -(2**30), dtype=torch.int32, device=device)
    for step, plan in filled:
        assert_plan_equals_reference(step, _narrowed(step, plan), arena)
    return arena


def _passing(step: Step, rng: random.Random) -> Step:
    """The step, half the time with device lengths and a quarter with tables that nothing else holds."""

    def lengths(of: Lengths) -> Lengths:
        values = torch.from_numpy(of.host)
        if step.device.type == "cuda":
            values = values.pin_memory()
        return Lengths(of.host, values.to(step.device, non_blocking=True, copy=True))

    if rng.random() < 0.5:
        step = dataclasses.replace(step, query_len=lengths(step.query_len), prior_len=lengths(step.prior_len))
    if rng.random() < 0.25:
        tables = tuple(dataclasses.replace(table, blocks=table.blocks.clone()) for table in step.tables)
        step = dataclasses.replace(step, tables=tables)
    return step


def _copied(plan: Plan) -> Plan:
    """The plan on tensors of its own."""

    def copied(values: object) -> dict[str, object]:
        return {name: of.clone() if isinstance(of, torch.Tensor) else of for name, of in vars(values).items()}

    groups: list[GroupPlan] = []
    for group in plan.groups:
        if isinstance(group, PagedPlan):
            groups.append(dataclasses.replace(group, **copied(group)))
        else:
            snapshots = dataclasses.replace(group.snapshots, **copied(group.snapshots))
            groups.append(dataclasses.replace(group, **{**copied(group), "snapshots": snapshots}))
    return dataclasses.replace(
        plan, shared=dataclasses.replace(plan.shared, **copied(plan.shared)), groups=tuple(groups)
    )


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
