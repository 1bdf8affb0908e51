"""The fixed buffers that plans live in: made once, sliced per step, never moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind, check_groups
from stepbind.plan.faults import FaultCounts
from stepbind.plan.plan import (
    CONV_CHUNK,
    GroupPlan,
    PagedPlan,
    Plan,
    Shared,
    Sizes,
    Snapshots,
    StatePlan,
    conv_list_size,
)
from stepbind.step import FEW_ROWS, Phase, Step

if TYPE_CHECKING:
    from stepbind.plan.fill_triton import Launcher


@dataclass(eq=False)
class Arena:
    """Buffers for steps of up to `max_rows` rows, `max_tokens` tokens and `max_context` tokens a row.

    `shared` and `groups` are a plan's values at full size; `fault_counts` says, per group, how many block table entries
    were needed but missing or out of range. state_sizes: the different block sizes of the state groups, in tokens.
    `launcher` is what the Triton fill keeps between steps, made when it first runs.
    """

    max_rows: int
    max_tokens: int
    max_context: int
    device: torch.device
    shared: Shared
    groups: tuple[GroupPlan, ...]
    group_of_layer: dict[int, int]
    fault_counts: FaultCounts
    cache_groups: tuple[CacheGroup, ...]
    state_sizes: tuple[int, ...]
    launcher: Launcher | None = None

    @property
    def faults(self) -> torch.Tensor:
        """[G, 2] int32, (count, lowest row) of each group's faults since they were last raised."""
        return self.fault_counts.counts


def make_arena(
    groups: Sequence[CacheGroup],
    *,
    max_rows: int,
    max_tokens: int,
    max_context: int,
    device: torch.device | str = "cpu",
    fault_counts: FaultCounts | None = None,
) -> Arena:
    """An arena for these groups. fault_counts: those of another arena for the same groups, to count in the same place.
    Raises `StepError` for groups that repeat a name or layer, or sizes under 1."""
    cache_groups = check_groups(groups)
    for name, value in (("max_rows", max_rows), ("max_tokens", max_tokens), ("max_context", max_context)):
        if value < 1:
            raise StepError(name, value, "at least 1")
    device = torch.device(device)

    def int32(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def no_blocks(*shape: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=device)

    def int64(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    chunks = conv_list_size(max_tokens // CONV_CHUNK + max_rows)
    shared = Shared(
        query_start=int32(max_rows + 1),
        query_len=int32(max_rows),
        prior_len=int32(max_rows),
        context_len=int32(max_rows),
        has_prior=torch.zeros(max_rows, dtype=torch.bool, device=device),
        row_of_token=int32(max_tokens),
        position=int64(max_tokens),
        span_start=int32(max_tokens),
        span_end=int32(max_tokens),
        conv_chunk_row=int32(chunks),
        conv_chunk_index=int32(chunks),
    )

    def group_buffers(group: CacheGroup) -> GroupPlan:
        if group.kind is GroupKind.STATE:
            # Every token can be a boundary (verify, or one token a block).
            snapshots = Snapshots(int32(max_tokens), int32(max_tokens), int32(max_tokens))
            return StatePlan(group, int32(max_rows), int32(max_rows), snapshots)
        columns = -(-max_context // group.kernel_block_size)
        physical = None
        if group.kind is GroupKind.LATENT:
            physical = no_blocks(max_rows, -(-max_context // group.block_size))
        return PagedPlan(group, int64(max_tokens), no_blocks(max_rows, columns), physical)

    if fault_counts is None:
        fault_counts = FaultCounts.of(cache_groups, device)
    return Arena(
        max_rows=max_rows,
        max_tokens=max_tokens,
        max_context=max_context,
        device=fault_counts.counts.device,  # with its number, as the tables' devices have one
        shared=shared,
        groups=tuple(group_buffers(group) for group in cache_groups),
        group_of_layer={layer: i for i, group in enumerate(cache_groups) for layer in group.layers},
        fault_counts=fault_counts,
        cache_groups=cache_groups,
        state_sizes=tuple({group.block_size: None for group in cache_groups if group.kind is GroupKind.STATE}),
    )


def plan_views(arena: Arena, step: Step) -> Plan:
    """The part of the arena that a step uses, with the step's scalars; its values are still to be filled.

    Raises `StepError` where the step is larger than the arena, is on another device, or has other groups.
    """
    check_fits(arena, step)
    rows, tokens = step.padded_rows, step.padded_tokens
    of_rows = row_views(arena, rows, step.max_context)
    states = state_views(arena, rows, [num_snapshots(step, size) for size in arena.state_sizes])
    shared, groups = step_views(arena, of_rows, states, tokens, conv_items(step))
    return Plan(Sizes.of(step), shared, groups, arena.group_of_layer)


@dataclass(frozen=True, eq=False)
class RowViews:
    """What a step has in common with all others of as many rows. tables: block_table and physical_table of each paged
    group."""

    query_start: torch.Tensor
    query_len: torch.Tensor
    prior_len: torch.Tensor
    context_len: torch.Tensor
    has_prior: torch.Tensor
    tables: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]


def row_views(arena: Arena, rows: int, max_context: int) -> RowViews:
    full = arena.shared

    def tables(plan: PagedPlan) -> tuple[torch.Tensor, torch.Tensor | None]:
        blocks, physical = plan.block_table[:rows, : -(-max_context // plan.group.kernel_block_size)], None
        if plan.physical_table is not None:
            physical = plan.physical_table[:rows, : -(-max_context // plan.group.block_size)]
        return blocks, physical

    return RowViews(
        query_start=full.query_start[: rows + 1],
        query_len=full.query_len[:rows],
        prior_len=full.prior_len[:rows],
        context_len=full.context_len[:rows],
        has_prior=full.has_prior[:rows],
        tables=tuple([tables(plan) for plan in arena.groups if isinstance(plan, PagedPlan)]),
    )


def state_views(arena: Arena, rows: int, snapshots: Sequence[int]) -> tuple[StatePlan, ...]:
    """The state groups' plans, with so many snapshots for each of `arena.state_sizes`."""

    def views(full: StatePlan, count: int) -> StatePlan:
        kept = full.snapshots
        kept = Snapshots(kept.row[:count], kept.offset[:count], kept.slot[:count])
        return StatePlan(full.group, full.state_read[:rows], full.state_write[:rows], kept)

    count_of = dict(zip(arena.state_sizes, snapshots, strict=True))
    return tuple([views(g, count_of[g.group.block_size]) for g in arena.groups if isinstance(g, StatePlan)])


def step_views(
    arena: Arena, of_rows: RowViews, states: tuple[StatePlan, ...], tokens: int, chunks: int
) -> tuple[Shared, tuple[GroupPlan, ...]]:
    """All values of a step of so many tokens and convolution chunks."""
    full = arena.shared
    shared = Shared(
        query_start=of_rows.query_start,
        query_len=of_rows.query_len,
        prior_len=of_rows.prior_len,
        context_len=of_rows.context_len,
        has_prior=of_rows.has_prior,
        row_of_token=full.row_of_token[:tokens],
        position=full.position[:tokens],
        span_start=full.span_start[:tokens],
        span_end=full.span_end[:tokens],
        conv_chunk_row=full.conv_chunk_row[:chunks],
        conv_chunk_index=full.conv_chunk_index[:chunks],
    )
    tables, left = iter(of_rows.tables), iter(states)
    groups: list[GroupPlan] = [
        PagedPlan(plan.group, plan.slot[:tokens], *next(tables)) if isinstance(plan, PagedPlan) else next(left)
        for plan in arena.groups
    ]
    return shared, tuple(groups)


def num_conv_chunks(step: Step) -> int:
    """Convolution programs of a step: ceil(query_len / CONV_CHUNK) a row outside of decode."""
    return 0 if step.phase is Phase.DECODE else num_chunks(step.query_len.host)


def num_chunks(query: npt.NDArray[np.int32]) -> int:
    """Convolution chunks of rows with so many new tokens each."""
    if query.size <= FEW_ROWS:
        return sum([-(-new // CONV_CHUNK) for new in query.tolist()])
    return -int((-query // CONV_CHUNK).sum())


def conv_items(step: Step) -> int:
    """Entries of a step's lists of convolution chunks."""
    return max(num_conv_chunks(step), step.padded_chunks)


def num_snapshots(step: Step, block_size: int) -> int:
    """Snapshots of a state group of `block_size` tokens a block: block boundaries strictly inside each row's new
    tokens; in verify, all tokens of a row but its last; none in decode."""
    if step.phase is Phase.DECODE or step.is_dummy:
        return 0
    if step.phase is Phase.VERIFY:
        return step.num_tokens - step.num_rows
    query, prior = step.query_len.host, step.prior_len.host
    if step.num_rows <= FEW_ROWS:
        pairs = zip(query.tolist(), prior.tolist(), strict=True)
        return sum([(old + new - 1) // block_size - old // block_size for new, old in pairs])
    last = prior + (query - 1)  # both fit, as their sum does
    return int((last // block_size - prior // block_size).sum())


def check_fits(arena: Arena, step: Step) -> None:
    """Raises `StepError` where the step is larger than the arena, is on another device, or has other groups."""
    if step.groups is not arena.cache_groups and step.groups != arena.cache_groups:
        names = [group.name for group in step.groups]
        raise StepError("tables", f"groups {names}", f"the arena's {[g.name for g in arena.cache_groups]}")
    if step.device != arena.device:
        raise StepError("tables", f"device {step.device}", f"the arena's {arena.device}")
    for name, got, limit in (
        ("padded_rows", step.padded_rows, arena.max_rows),
        ("padded_tokens", step.padded_tokens, arena.max_tokens),
        ("padded_chunks", step.padded_chunks, arena.shared.conv_chunk_row.shape[0]),
        ("max_context", step.max_context, arena.max_context),
    ):
        if got > limit:
            raise StepError(name, got, f"at most the arena's {limit}")
