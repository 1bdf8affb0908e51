"""Step -> Plan: what the kernels need, in fixed buffers."""

from __future__ import annotations

from stepbind.plan.arena import Arena, make_arena, plan_views
from stepbind.plan.faults import FaultCounts
from stepbind.plan.fill_torch import fill_torch
from stepbind.plan.plan import (
    CONV_CHUNK,
    GroupPlan,
    PagedPlan,
    Plan,
    Shared,
    Sizes,
    Snapshots,
    StatePlan,
)
from stepbind.plan.pool import ArenaPool
from stepbind.step import Step

__all__ = [
    "CONV_CHUNK",
    "Arena",
    "ArenaPool",
    "FaultCounts",
    "GroupPlan",
    "PagedPlan",
    "Plan",
    "Shared",
    "Sizes",
    "Snapshots",
    "StatePlan",
    "build_plan",
    "check_faults",
    "make_arena",
]


def build_plan(step: Step, arena: Arena, *, strict: bool | None = None, triton: bool | None = None) -> Plan:
    """The plan of a step, in the arena's buffers: the next call overwrites it.

    On a GPU a Triton kernel fills it, elsewhere torch operations; `triton` says so explicitly (on the CPU, where it
    needs Triton's interpreter, for tests).

    Block table entries that the step needs but that are missing (-1, a reserved block) or out of range become
    -1 in the plan, so that no op reads or writes through them, and are counted in `arena.faults`. strict=True
    raises `BlockFaultError` for them before returning (on a GPU that waits for it); strict=False leaves that to
    `check_faults`. The default is strict on the CPU, where looking costs no wait.

    Raises `StepError` where the step does not fit the arena.
    """
    if triton or (triton is None and arena.device.type == "cuda"):
        from stepbind.plan.fill_triton import fill_triton

        plan = fill_triton(step, arena)
    else:
        plan = plan_views(arena, step)
        fill_torch(step, plan, arena)
    if strict or (strict is None and arena.device.type == "cpu"):
        check_faults(arena)
    return plan


def check_faults(arena: Arena) -> None:
    """Raise `BlockFaultError` for faults counted since the last call, and forget them. Reads device memory: call it
    where waiting is free."""
    arena.fault_counts.check()
