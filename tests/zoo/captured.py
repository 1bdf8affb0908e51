"""A captured pass and its replays, emulated on the CPU.

A graph holds the tensors of the pass that it was captured with, and what the host computed then. So does a `Captured`:
every replay runs the fill and the forward of the captured step, on the captured plan's own tensors, after the host
changed in place exactly what a host refreshes. All else holds garbage by then.
"""

from __future__ import annotations

import dataclasses

import torch

from stepbind import Phase, Plan, build_plan, make_step
from stepbind.plan import Arena, StatePlan
from stepbind.step import Lengths
from tests.zoo.harness import HandMade

GARBAGE = 7
"""A row, a length, a position, and a block of somebody: what an earlier pass could have left."""


class Captured:
    """A decode or verify pass of `rows` padded rows, captured without a live row."""

    def __init__(self, host: HandMade, rows: int, phase: Phase = Phase.DECODE, query: int = 1) -> None:
        self.host, self.rows, self.query = host, rows, query
        self.ids = torch.zeros(rows * query, dtype=torch.long)
        self.query_len = torch.zeros(rows, dtype=torch.int32)
        self.prior_len = torch.zeros(rows, dtype=torch.int32)
        context = host.arena.max_context
        self.tables = {
            group.name: torch.zeros(rows, context // group.block_size + query, dtype=torch.int32)
            for group in host.groups
        }
        # The host's lengths say how long rows can get, and nothing about a replay.
        self.step = make_step(
            host.groups,
            phase,
            Lengths(Lengths.of([query] * rows).host, self.query_len),
            Lengths(Lengths.of([context - query] * rows).host, self.prior_len),
            self.tables,
            lengths_are_bounds=True,
        )
        self.plan: Plan = build_plan(self.step, host.arena)
        self.logits = host.forward(self.plan, self.ids)

    def replay(
        self, tables: dict[str, list[list[int]]], tokens: list[list[int]], prior: list[int], strict: bool | None = None
    ) -> torch.Tensor:
        """Logits [rows * query, vocabulary] of a batch of at most `rows` rows. Padding rows keep the tables that the
        last larger batch left there."""
        live = len(tokens)
        self.ids[: live * self.query] = torch.tensor([token for row in tokens for token in row])
        self.query_len[:live], self.query_len[live:] = self.query, 0
        self.prior_len[:live], self.prior_len[live:] = torch.tensor(prior, dtype=torch.int32), 0
        for name, blocks in tables.items():
            for row, of_row in enumerate(blocks):
                self.tables[name][row, : len(of_row)] = torch.tensor(of_row, dtype=torch.int32)
        spoil(self.host.arena)
        build_plan(self.step, self.host.arena, strict=strict)
        return self.host.forward(self.plan, self.ids)


def spoil(arena: Arena) -> None:
    """Garbage in every buffer that plans live in."""
    snapshots = [group.snapshots for group in arena.groups if isinstance(group, StatePlan)]
    for values in (arena.shared, *arena.groups, *snapshots):
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if isinstance(value, torch.Tensor):
                value.fill_(GARBAGE if value.dtype is not torch.bool else 1)
