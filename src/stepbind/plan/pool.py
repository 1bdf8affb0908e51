"""Arenas for eager steps that are bound at the same time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from stepbind.plan.arena import Arena, make_arena
from stepbind.plan.faults import FaultCounts
from stepbind.step import Step


@dataclass(eq=False)
class ArenaPool:
    """Arenas for eager steps of one set of groups: one for each thread and level of nesting, so that a step leaves
    alone the values of those bound around it and of other threads, which may have streams of their own. They are made
    when a step needs them, grow, and are kept; all count their faults in one place, where growing loses none.

    min_rows, min_context: sizes that an arena has at least, in rows and tokens.
    """

    min_rows: int
    min_context: int = 1
    fault_counts: FaultCounts | None = None
    _arenas: dict[tuple[int, int], Arena] = field(default_factory=dict)
    _making: threading.Lock = field(default_factory=threading.Lock)

    def arena_for(self, step: Step, level: int) -> Arena:
        """level: how many steps this thread has bound around this one. The arena of a level is its next step's too."""
        key = (threading.get_ident(), level)
        arena = self._arenas.get(key)
        if (
            arena is None
            or arena.max_rows < step.padded_rows
            or arena.max_tokens < step.padded_tokens
            or arena.max_context < step.max_context
        ):
            arena = self._arenas[key] = self._larger(step, arena)
        return arena

    def _larger(self, step: Step, old: Arena | None) -> Arena:
        rows, tokens, context = self.min_rows, 1, self.min_context
        if old is not None:
            rows, tokens, context = old.max_rows, old.max_tokens, old.max_context
        with self._making:
            arena = make_arena(
                step.groups,
                max_rows=_grown(rows, step.padded_rows),
                max_tokens=_grown(tokens, step.padded_tokens),
                max_context=_grown(context, step.max_context),
                device=step.device,
                fault_counts=self.fault_counts,
            )
            self.fault_counts = arena.fault_counts
        return arena

    def raise_seen(self) -> None:
        """`FaultCounts.raise_seen`, which waits for nothing."""
        if self.fault_counts is not None:
            self.fault_counts.raise_seen()

    def check(self, of: str = "") -> None:
        """`FaultCounts.check`, which waits."""
        if self.fault_counts is not None:
            self.fault_counts.check(of)


def _grown(size: int, needed: int) -> int:
    return size if needed <= size else max(needed, 2 * size)
