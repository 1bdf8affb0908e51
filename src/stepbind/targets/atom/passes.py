"""One pass, computed: on the CPU from host values, on a GPU and in captures through the plan."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stepbind.errors import StepError
from stepbind.groups import GroupKind
from stepbind.hosts.rtp_llm.reader import read_pass
from stepbind.hosts.rtp_llm.steps import Scratch, StepOptions, step_of
from stepbind.plan import Arena, ArenaPool, Plan, build_plan, make_arena
from stepbind.plan.arena import num_chunks
from stepbind.plan.plan import conv_list_size
from stepbind.step import INT32_MAX, Granularity, Step
from stepbind.targets.atom.computed import Computed
from stepbind.targets.atom.groups import AtomGroups, granularity
from stepbind.targets.atom.metadata import Profile
from stepbind.targets.atom.read import (
    AtomPass,
    Numbers,
    Offsets,
    context_lengths,
    numbers,
    prefix_of,
    query_start_for,
    query_start_of,
)
from stepbind.targets.atom.shared import SharedValues, of_plan, on_host
from stepbind.targets.atom.tables import first_granularity, first_table, group_table, to_physical
from stepbind.targets.atom.values import GroupTable, GroupValues, Rows, from_plan, highest, slots_at, values_of

if TYPE_CHECKING:
    from stepbind.targets.atom.known import Key, Known

MIN_ROWS = 256
"""Rows that buffers are made for at least."""


@dataclass(eq=False)
class PlanBuffers:
    """What passes that use the plan work in, kept between them for one set of groups. Those of captured passes are made
    with the first of them, which is the host's largest, and stay where they are, since graphs hold their addresses;
    those of eager ones grow.

    eager, lenient: arenas of eager passes, whose faults are raised, and of those with strict=False, whose are not.
    """

    captured: Arena | None = None
    captured_scratch: Scratch | None = None
    eager: ArenaPool = field(default_factory=lambda: ArenaPool(MIN_ROWS))
    lenient: ArenaPool = field(default_factory=lambda: ArenaPool(MIN_ROWS))
    eager_scratch: dict[int, Scratch] = field(default_factory=dict)
    tables: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    known: dict[Key, Known] = field(default_factory=dict)

    def scratch_for(self, host: AtomPass) -> Scratch:
        """The thread's own. The fill reads it, and nobody behind that: nested passes may use it in turn."""
        thread = threading.get_ident()
        scratch = self.eager_scratch.get(thread)
        if scratch is None or scratch.ones.shape[0] < host.num_rows:
            scratch = Scratch.of(max(host.num_rows, MIN_ROWS), host.tables[0].device)
            self.eager_scratch[thread] = scratch
        return scratch

    def scratch_for_capture(self, host: AtomPass) -> Scratch:
        """Raises `StepError` for more rows than the first captured pass had."""
        if self.captured_scratch is None:
            self.captured_scratch = Scratch.of(max(host.num_rows, MIN_ROWS), host.tables[0].device)
        most = self.captured_scratch.ones.shape[0]
        if host.num_rows > most:
            raise StepError("attention_inputs.input_lengths", f"{host.num_rows} rows", f"at most {most} in a capture")
        return self.captured_scratch

    def captured_arena(self, step: Step, max_context: int) -> Arena:
        if self.captured is None:
            rows = max(step.num_rows, MIN_ROWS)
            self.captured = make_arena(
                step.groups, max_rows=rows, max_tokens=rows, max_context=max_context, device=step.device
            )
        return self.captured

    def raise_seen(self) -> None:
        """Raise `BlockFaultError` for faults of earlier passes, replays among them, that the host has seen: waits for
        nothing where there are none."""
        self.eager.raise_seen()
        if self.captured is not None:
            self.captured.fault_counts.raise_seen()

    def check(self) -> None:
        """Raise `BlockFaultError` for faults of any pass since they were last raised. Waits for the device."""
        self.eager.check("eager passes")
        self.lenient.check("eager passes that are not strict")
        if self.captured is not None:
            self.captured.fault_counts.check("captured passes")

    def table(self, name: str, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """A buffer [rows, columns] int32 for a table that a captured pass computes."""
        key = (name, rows, columns)
        if key not in self.tables:
            self.tables[key] = torch.empty(rows, columns, dtype=torch.int32, device=device)
        return self.tables[key]

    def upto(self, count: int, device: torch.device) -> torch.Tensor:
        """0 .. count-1, int32."""
        key = ("upto", 1, count)
        if key not in self.tables:
            self.tables[key] = torch.arange(count, dtype=torch.int32, device=device)[None]
        return self.tables[key][0]


def compute_on_host(
    host: AtomPass, positions: torch.Tensor, profile: Profile, groups: AtomGroups, strict: bool | None, budget: int
) -> Computed:
    """From values that are on the host. `budget`: context of a dummy pass, at least 1."""
    seq_lens = context_lengths(host, profile, in_graph=host.graph_flag)
    context = numbers(seq_lens)
    assert context is not None
    longest = int(context.max())
    is_dummy = longest <= 0
    num_tokens = positions.numel()
    own_start = query_start_of(host)
    query_start = query_start_for(host, num_tokens, own_start)
    rows = Rows.of(context - 1 if seq_lens is host.plus_one and not host.is_prefill else _prior(host), query_start)
    tokens = max(longest, 1)
    tables = [group_table(source, host, profile, tokens) for source in groups.sources]
    has_states = bool(groups.state_groups)
    if has_states and 0 not in groups.state_groups:  # the reference's fields are the first group's all the same
        tables.append(GroupTable(0, groups.first_states, host.tables[0], Granularity.PHYSICAL, False))
    values = values_of(tables, rows, strict=_is_strict(strict, host, is_dummy))
    block_table = first_table(host, profile, groups, tokens)
    read, write = _first_states(values) if has_states else (None, None)
    return Computed(
        is_dummy=is_dummy,
        num_rows=host.num_rows,
        num_tokens=num_tokens,
        shared=on_host(rows, host.is_prefill, profile.sparse_fields),
        query_start_host=own_start,
        seq_lens=seq_lens,
        max_query=max(int(rows.query.max()), 1),
        max_context=budget if is_dummy else longest,
        total_context=int(context.sum()),
        has_prior=_has_prior(host) if has_states and host.is_prefill else None,
        has_prefix=_has_prefix(host),
        block_table=block_table,
        slot_mapping=_first_slots_on_host(positions, profile, groups, tables, values, rows, block_table),
        groups=values[: len(groups.sources)],
        state_read=read,
        state_write=write,
        own_start=_own_start(own_start, host.num_rows, num_tokens, block_table.device),
    )


def _own_start(offsets: Offsets, rows: int, tokens: int, device: torch.device) -> torch.Tensor | None:
    """`Computed.own_start`: the host's offsets where they are not of these rows and tokens."""
    if offsets.size == rows + 1 and offsets[-1] == tokens:
        return None
    return torch.from_numpy(offsets).to(device)


def _first_slots_on_host(
    positions: torch.Tensor,
    profile: Profile,
    groups: AtomGroups,
    tables: list[GroupTable],
    values: tuple[GroupValues, ...],
    rows: Rows,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Slots of the `positions` in the first group's table, in physical blocks. Where positions count tokens they are
    those of the group itself."""
    given = positions.numpy().astype(np.int32, copy=False)
    if given.tobytes() == rows.token.tobytes():
        for table, group in zip(tables, values, strict=True):
            physical = profile.physical_table or table.granularity is Granularity.PHYSICAL
            if table.number == 0 and group.slot_mapping is not None and physical:
                return group.slot_mapping
    first = GroupTable(0, groups.first_slots, block_table, Granularity.PHYSICAL)
    return torch.from_numpy(slots_at(first, rows.row_of_token, given))


def _first_states(values: tuple[GroupValues, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """State slots of the first of the host's groups, which is what the reference's one field holds."""
    for group in values:
        if group.number == 0 and group.kind is GroupKind.STATE:
            return group.state_read, group.state_write
    return None, None


def _prior(host: AtomPass) -> Numbers:
    """[B] tokens in the cache before the pass."""
    if host.is_prefill:
        prior = numbers(prefix_of(host, device_first=False))
    elif host.plus_one is not None:
        context = numbers(host.plus_one)
        prior = None if context is None else context - 1
    else:
        prior = numbers(host.sequence_len)
    assert prior is not None
    return prior


def _has_prior(host: AtomPass) -> torch.Tensor:
    prefix = numbers(prefix_of(host, device_first=True))
    assert prefix is not None
    return torch.from_numpy(prefix > 0)


def _has_prefix(host: AtomPass) -> bool:
    prefix = numbers(host.prefix_len)
    return prefix is not None and highest(prefix) > 0


def _is_strict(strict: bool | None, host: AtomPass, is_dummy: bool) -> bool:
    return not (is_dummy or host.graph_flag) if strict is None else strict and not is_dummy


def compute_by_plan(
    inputs: Any,
    host: AtomPass,
    num_tokens: int,
    profile: Profile,
    groups: AtomGroups,
    buffers: PlanBuffers,
    budget: int,
    strict: bool | None,
    level: int = 0,
) -> Computed:
    """An eager pass from its plan. level: passes of the same runtime that this thread has bound around it.

    Raises `BlockFaultError`: with `strict` for the faults of this pass, which waits for the GPU; otherwise, but for
    passes that are not to raise, for those of earlier ones that the host has seen by now.
    """
    pool = buffers.eager
    if strict:
        pool.check("earlier passes")
    elif _is_strict(strict, host, False):
        buffers.raise_seen()
    else:
        pool = buffers.lenient
    tables = [group_table(source, host, profile, _longest(host)) for source in groups.planned]
    pass_ = read_pass(inputs, num_tokens=num_tokens)
    chosen = {table.number: table.blocks for table in tables}
    own = [replace(table, blocks=chosen.get(number, table.blocks)) for number, table in enumerate(pass_.tables)]
    own_start, new = query_start_of(host), numbers(host.input_len) if host.is_prefill else None
    options = StepOptions(
        granularity={table.group.name: table.granularity for table in tables},
        padded_chunks=0 if new is None or not groups.state_groups else conv_list_size(num_chunks(new)),
    )
    pass_ = replace(pass_, tables=tuple(own))
    step = step_of(pass_, groups.planned, buffers.scratch_for(host), INT32_MAX, options)
    plan = build_plan(step, pool.arena_for(step, level), strict=bool(strict))
    sizes, values = plan.sizes, from_plan(plan, [table.number for table in tables], [table.blocks for table in tables])
    read, write = _first_states(values)
    # Offsets of the host's own that are not by its lengths have other chunks.
    with_lists = bool(options.padded_chunks) and np.array_equal(np.diff(own_start), sizes.query_len)
    return Computed(
        is_dummy=sizes.is_dummy,
        num_rows=host.num_rows,
        num_tokens=num_tokens,
        shared=of_plan(plan, host.is_prefill, torch.from_numpy(own_start).dtype, profile.sparse_fields, with_lists),
        query_start_host=own_start,
        seq_lens=_planned_lengths(host, profile, plan),
        max_query=max(sizes.max_query, 1),
        max_context=budget if sizes.is_dummy else sizes.max_context,
        total_context=sizes.total_context,
        has_prior=plan.shared.has_prior if groups.state_groups and host.is_prefill else None,
        has_prefix=_has_prefix(host),
        block_table=first_table(host, profile, groups, max(sizes.max_context, 1)),
        slot_mapping=_first_slots(values),
        groups=values[: len(groups.sources)],
        state_read=read,
        state_write=write,
        own_start=_own_start(own_start, host.num_rows, num_tokens, step.device),
    )


def _planned_lengths(host: AtomPass, profile: Profile, plan: Plan) -> torch.Tensor:
    """`context_lengths`, out of the plan where it has them."""
    if host.is_prefill and not (profile.prefill_context_is_plus_one and host.plus_one is not None):
        return plan.shared.context_len
    return context_lengths(host, profile, in_graph=host.graph_flag)


def compute_captured(
    inputs: Any, host: AtomPass, profile: Profile, groups: AtomGroups, buffers: PlanBuffers, max_context: int
) -> Computed:
    """A captured decode pass, and the warm-up before its capture, which makes the buffers: everything is computed from
    what replay refreshes. Padding rows have context 0 and slots -1. `max_context`: of any replay, in tokens; it bounds
    what lengths can be.

    Raises `StepError` for a prefill pass and without a bound.
    """
    if host.is_prefill:
        raise StepError("is_prefill", "a prefill pass in a capture", "a decode pass, of one token a row")
    if max_context <= 0:
        raise StepError("cg_max_seq_len", max_context, "the longest context of a replay, in tokens")
    rows = host.num_rows
    pass_ = read_pass(inputs, is_graph=True, num_tokens=rows)
    said = {source.group.name: granularity(source, host, profile, None) for source in groups.planned}
    step = step_of(pass_, groups.planned, buffers.scratch_for_capture(host), max_context, StepOptions(granularity=said))
    plan = build_plan(step, buffers.captured_arena(step, max_context), strict=False)
    table_numbers = [source.table for source in groups.planned]
    values = from_plan(plan, table_numbers, [host.tables[number] for number in table_numbers])
    read, write = _first_states(values)
    upto_rows = buffers.upto(rows + 1, step.device)
    return Computed(
        is_dummy=False,
        num_rows=rows,
        num_tokens=rows,
        shared=SharedValues(upto_rows, upto_rows[:rows], None, None),
        query_start_host=np.arange(rows + 1, dtype=np.int32),
        seq_lens=plan.shared.context_len,
        max_query=1,
        max_context=max_context,
        total_context=max_context * rows,
        has_prior=None,
        has_prefix=False,
        block_table=_captured_table(host, profile, groups, buffers),
        slot_mapping=_first_slots(values),
        groups=values[: len(groups.sources)],
        state_read=read,
        state_write=write,
    )


def _captured_table(host: AtomPass, profile: Profile, groups: AtomGroups, buffers: PlanBuffers) -> torch.Tensor:
    """The first group's table: never the store's, which replay does not refresh (seed behaviour 6)."""
    table, ratio = host.tables[0], groups.block_size // groups.kernel_block_size
    if not profile.physical_table or first_granularity(host, profile, groups, None) is Granularity.PHYSICAL:
        return table
    out = buffers.table("physical", table.shape[0], table.shape[1] // ratio, table.device)
    return to_physical(table, ratio, Granularity.KERNEL, out)


def _longest(host: AtomPass) -> int | None:
    """The longest context by host lengths, at least 1; None where those are on the device alone."""
    if not host.is_prefill:
        sequence = numbers(host.sequence_len)
        return None if sequence is None else int(sequence.max()) + 1
    prefix, new = numbers(prefix_of(host, device_first=False)), numbers(host.input_len)
    return None if prefix is None or new is None else max(int((prefix + new).max()), 1)


def _first_slots(values: tuple[GroupValues, ...]) -> torch.Tensor:
    """Slots in the first of the host's groups; among `AtomGroups.planned` there is one that has them."""
    return next(group.slot_mapping for group in values if group.number == 0 and group.slot_mapping is not None)
