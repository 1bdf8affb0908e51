"""Known faults, switched on for a while, so that a reader sees what each does to the answers. Never for serving.

Each spoils the plan between the fill and the layers, which is where the bridges that have it go wrong. Captured graphs
on a GPU hold the plan that they were captured with, whole or spoiled: a capture inside the block is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from stepbind.errors import StepError
from stepbind.hosts.local import engine, graphs
from stepbind.plan import PagedPlan, Plan, StatePlan, build_plan


def read_from_the_write_slot(plan: Plan) -> None:
    """A row with tokens before this pass reads its state where it is about to write it (the reference bridge's rule):
    at every block boundary, whatever the new block held before."""
    for group in plan.groups:
        if isinstance(group, StatePlan):
            group.state_read.copy_(torch.where(group.state_read >= 0, group.state_write, group.state_read))


def write_one_block_behind(plan: Plan) -> None:
    """The first token of a block goes to the block before it, as with a table that was read before it was extended."""
    shared = plan.shared
    for group in plan.groups:
        if isinstance(group, PagedPlan):
            page = group.group.kernel_block_size
            first = (group.slot >= 0) & (shared.position % page == 0) & (shared.position > 0)
            rows, columns = shared.row_of_token[first].long(), shared.position[first] // page - 1
            group.slot[first] = group.block_table[rows, columns].long() * page


def let_padding_write(plan: Plan) -> None:
    """Rows that pad a graph keep the slots of a row that lives: what they compute from nothing overwrites its own."""
    padding = plan.shared.query_len == 0
    for group in plan.groups:
        if isinstance(group, StatePlan):
            group.state_write[padding] = group.state_write[0]
        elif group.slot.shape == padding.shape:
            group.slot[padding] = group.slot[0]


FAULTS: dict[str, Callable[[Plan], None]] = {
    "state": read_from_the_write_slot,
    "slot": write_one_block_behind,
    "padding": let_padding_write,
}


@contextmanager
def broken(fault: str) -> Iterator[None]:
    """Every plan of the local host has the fault inside the block. Raises `StepError` for a name not in FAULTS."""
    if fault not in FAULTS:
        raise StepError("fault", repr(fault), f"one of {', '.join(FAULTS)}")

    def spoiled(*args: Any, **options: Any) -> Plan:
        plan = build_plan(*args, **options)
        if plan.shared.query_len.is_cuda and torch.cuda.is_current_stream_capturing():
            raise StepError("fault", f"{fault!r} in a graph capture", "eager passes, or graphs on the CPU")
        FAULTS[fault](plan)
        return plan

    with patch.object(engine, "build_plan", spoiled), patch.object(graphs, "build_plan", spoiled):
        yield
