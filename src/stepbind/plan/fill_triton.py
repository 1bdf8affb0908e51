"""The host's side of the GPU fill: descriptors, the one copy that lengths may need, and the launch.

After warm-up a decode step costs a look-up of what is remembered for its sizes and one launch. What varies reaches
the kernel through device memory: lengths are read where an argument says they are, tables where a descriptor says.
Descriptors are remembered by their whole content and never rewritten, so that a captured fill can rely on its own; a
host whose tables stay where they are needs one for each of its table sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from stepbind.errors import StepError
from stepbind.groups import GroupKind
from stepbind.plan import fill_kernels as kernels
from stepbind.plan.arena import (
    Arena,
    RowViews,
    check_fits,
    conv_items,
    num_snapshots,
    row_views,
    state_views,
    step_views,
)
from stepbind.plan.fill_ragged import fill_ragged
from stepbind.plan.launch import Call, compiled_for, launch_on, pointer_to
from stepbind.plan.plan import GroupPlan, PagedPlan, Plan, Shared, Sizes, StatePlan
from stepbind.plan.staging import Staging
from stepbind.step import Phase, Step

ROWS = 4
"""Rows of one program."""
TOKENS = 128
"""Tokens (or convolution chunks, or snapshots) of one program."""
COLUMNS = 512
"""Table columns that a program copies at once, at most."""
SEARCH = 128
"""Rows that a search for a token's row looks at once."""
MAX_SEARCH_DECODE = 256
"""The same, at most, for counting the tokens of a decode step."""
NARROW = 128
"""Table columns up to which a decode program does better with 2 warps than with 4."""
PROGRAMS = 1056
"""Programs that are worth starting to copy tables: eight for each of an H200's 132 multiprocessors."""

MAX_BUCKETS = 512
MAX_DESCRIPTORS = 256


def fill_triton(step: Step, arena: Arena) -> Plan:
    """The plan of a step, filled by one launch on the current stream; nothing waits for it.

    One pinned copy carries the lengths where the host has them on the host only, or a descriptor when tables are at a
    place seen for the first time; otherwise nothing is copied. A captured fill must need no copy: it raises
    `StepError` then. Faults are added to `arena.faults`.
    """
    check_fits(arena, step)
    if arena.launcher is None:
        arena.launcher = Launcher.of(arena)
    return arena.launcher.fill(step)


@dataclass(frozen=True, eq=False)
class _Bucket:
    """What all steps of the same sizes share: the plan's views, and the call that fills them.

    A prefill's sizes are rarely those of an earlier one, so that a new bucket has to cost little: compiled kernels,
    views by rows, and those of state groups, whose snapshots have few sizes, are kept for themselves.
    """

    shared: Shared
    groups: tuple[GroupPlan, ...]
    call: Call


@dataclass(eq=False)
class Launcher:
    """What the GPU fill of one arena remembers between steps.

    words: [D] int64, a descriptor on the host; those at `varying` are a step's own (`written`: the last such ones),
        the others the arena's.
    powers: whether all block sizes are powers of two, and stand as exponents in the descriptor.
    widest: columns of the widest table, in kernel blocks.
    upload: [D + max_rows] int64 on the device: the descriptor and lengths of a step that needs a copy.
    captured: descriptors that graphs read, which may live longer than `descriptors` has room for them.
    """

    arena: Arena
    words: npt.NDArray[np.int64]
    varying: npt.NDArray[np.int64]
    powers: bool
    widest: int
    upload: torch.Tensor
    uploaded_lengths: int
    staging: Staging
    calls: dict[tuple[int, ...], Call]
    buckets: dict[tuple[int, ...], _Bucket]
    row_views: dict[int, RowViews]
    state_views: dict[tuple[int, ...], tuple[StatePlan, ...]]
    compiled: dict[tuple[int | bool, ...], Any]
    descriptors: dict[tuple[int, ...], torch.Tensor]
    captured: set[torch.Tensor]
    written: tuple[int, ...] = ()

    @staticmethod
    def of(arena: Arena) -> Launcher:
        fields, per_group = kernels.STEP_FIELDS.value, kernels.GROUP_FIELDS.value
        sizes = [size for group in arena.cache_groups for size in (group.block_size, group.kernel_block_size)]
        powers = all(size & (size - 1) == 0 for size in sizes)
        words = np.zeros(fields + per_group * len(arena.groups), dtype=np.int64)
        outputs = [values.data_ptr() for values in vars(arena.shared).values()]
        words[kernels.OUT_QUERY_START.value : kernels.OUT_CHUNK_INDEX.value + 1] = outputs
        words[kernels.FAULT_SEEN.value] = arena.fault_counts.seen.ctypes.data
        varying = list(range(kernels.OUT_QUERY_START.value))
        for index, group_plan in enumerate(arena.groups):
            start = fields + index * per_group
            words[start : start + per_group] = _group_words(group_plan, arena.faults[index], powers)
            varying += range(start + kernels.TABLE.value, start + kernels.IDS_PER_BLOCK.value + 1)
        tables = [plan.block_table for plan in arena.groups if isinstance(plan, PagedPlan)]
        upload = torch.zeros(words.size + arena.max_rows, dtype=torch.int64, device=arena.device)
        return Launcher(
            arena=arena,
            words=words,
            varying=np.array(varying),
            powers=powers,
            widest=max([table.shape[1] for table in tables], default=1),
            upload=upload,
            uploaded_lengths=upload.data_ptr() + 8 * words.size,
            staging=Staging(upload.shape[0], words.size, pinned=arena.device.type == "cuda"),
            calls={},
            buckets={},
            row_views={},
            state_views={},
            compiled={},
            descriptors={},
            captured=set(),
        )

    def fill(self, step: Step) -> Plan:
        query, prior = step.query_len.device, step.prior_len.device
        are_there = query is not None and prior is not None
        bucket = self._bucket_of(step, step.contexts_on_device and are_there)
        if query is None or prior is None:
            descriptor, start = self._send(step), self.uploaded_lengths
            lengths = (start, start + 4 * step.num_rows)
        else:
            descriptor, lengths = self._descriptor(step), (query.data_ptr(), prior.data_ptr())
            if _is_capturing(self.arena):
                self.captured.add(descriptor)
        call = bucket.call
        call.launch(pointer_to(descriptor), *lengths, step.num_rows, *call.arguments)
        return Plan(Sizes.of(step), bucket.shared, bucket.groups, self.arena.group_of_layer, descriptor)

    def call_of(self, sizes: tuple[int, ...]) -> Call:
        """The fill alone, for callers that keep a plan's views and descriptor, and know that the step fits as that of
        the plan did.

        sizes: rows and tokens that the kernel runs at, and in decode whether contexts are on the device; else whether
        the phase is verify, entries of the lists of convolution chunks, and most snapshots of a group.
        """
        call = self.calls.get(sizes)
        if call is None:
            _make_room(self.calls, MAX_BUCKETS)
            call = self.calls[sizes] = self._call(*sizes)
        return call

    def _bucket_of(self, step: Step, contexts: bool) -> _Bucket:
        if step.phase is Phase.DECODE:
            key: tuple[int, ...] = (step.padded_rows, step.padded_tokens, contexts)
        else:
            snapshots = [num_snapshots(step, size) for size in self.arena.state_sizes]
            verify = step.phase is Phase.VERIFY
            key = (step.padded_rows, step.padded_tokens, verify, conv_items(step), *snapshots)
        bucket = self.buckets.get(key)
        if bucket is None:
            _make_room(self.buckets, MAX_BUCKETS)
            bucket = self.buckets[key] = self._bucket(*key)
        return bucket

    def _bucket(self, rows: int, tokens: int, variant: int, *lists: int) -> _Bucket:
        """lists: none in decode, else entries of the lists of chunks, and of those of snapshots by `state_sizes`."""
        chunks, *snapshots = lists or (0, *[0] * len(self.arena.state_sizes))
        views = self._views(rows, tuple(snapshots))
        shared, groups = step_views(self.arena, *views, tokens, chunks)
        most = (chunks, max(snapshots, default=0)) if lists else ()
        return _Bucket(shared, groups, self.call_of((rows, tokens, variant, *most)))

    def _call(self, rows: int, tokens: int, variant: int, *lists: int) -> Call:
        """As `call_of`."""
        num_groups, row_blocks = len(self.arena.groups), -(-rows // ROWS)
        columns = min(COLUMNS, max(32, triton.next_power_of_2(self.widest)))
        parts = max(1, min(PROGRAMS // (row_blocks * num_groups), -(-self.widest // columns)))
        if not lists:
            kernel: Any = kernels.fill_decode
            grid = (-(-max(rows, tokens) // ROWS), num_groups, 1 + parts)
            search = min(MAX_SEARCH_DECODE, max(32, triton.next_power_of_2(rows)))
            numbers: tuple[int, ...] = (rows, tokens)
            constants: tuple[int | bool, ...] = (ROWS, columns, search, self.powers, bool(variant))
            warps = 2 if columns <= NARROW else 4
        else:
            kernel = fill_ragged
            items = (tokens, *lists)
            grid = (sum([-(-count // TOKENS) for count in items]) + row_blocks * parts, num_groups, 1)
            numbers = (rows, *items, row_blocks, parts)
            constants = (bool(variant), TOKENS, ROWS, columns, SEARCH, self.powers)
            warps = 4
        compiled = self.compiled.get(constants)
        if compiled is None:
            address = self.uploaded_lengths
            arguments = (self.upload, address, address, rows, *numbers, *constants)
            compiled = self.compiled[constants] = compiled_for(kernel, warps, *arguments)
        return Call(launch_on(compiled, grid, self.arena.device), (*numbers, *constants))

    def _views(self, rows: int, snapshots: tuple[int, ...]) -> tuple[RowViews, tuple[StatePlan, ...]]:
        of_rows = self.row_views.get(rows)
        if of_rows is None:
            _make_room(self.row_views, MAX_BUCKETS)
            of_rows = self.row_views[rows] = row_views(self.arena, rows, self.arena.max_context)
        key = (rows, *snapshots)
        states = self.state_views.get(key)
        if states is None:
            _make_room(self.state_views, MAX_BUCKETS)
            states = self.state_views[key] = state_views(self.arena, rows, snapshots)
        return of_rows, states

    def _descriptor(self, step: Step) -> torch.Tensor:
        """The descriptor on the device of a step whose lengths are there too."""
        key = _varying(step)
        descriptor = self.descriptors.get(key)
        if descriptor is None:
            _make_room(self.descriptors, MAX_DESCRIPTORS)
            _check_not_capturing(self.arena, "tables at addresses not filled from before")
            words = self._words(key)
            staged = self.staging.take()
            staged.words[:] = words
            descriptor = torch.empty(words.size, dtype=torch.int64, device=self.arena.device)
            descriptor.copy_(staged.buffer[: words.size], non_blocking=True)
            self.descriptors[key] = descriptor
        return descriptor

    def _send(self, step: Step) -> torch.Tensor:
        """Copy a descriptor and the lengths behind it to the device together."""
        _check_not_capturing(self.arena, "lengths on the host only")
        rows, staged = step.num_rows, self.staging.take()
        staged.words[:] = self._words(_varying(step))
        staged.lengths[:rows] = step.query_len.host
        staged.lengths[rows : 2 * rows] = step.prior_len.host
        self.upload.copy_(staged.buffer, non_blocking=True)
        return self.upload

    def _words(self, varying: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """The host's descriptor with these fields of a step's own."""
        if varying != self.written:
            self.words[self.varying] = varying
            if self.powers:
                start = kernels.STEP_FIELDS.value + kernels.IDS_PER_BLOCK.value
                ids = self.words[start :: kernels.GROUP_FIELDS.value]
                ids[:] = [_exponent(count) for count in ids.tolist()]
            self.written = varying
        return self.words


def _varying(step: Step) -> tuple[int, ...]:
    """The fields of a descriptor that are a step's own, in their order."""
    position = step.position
    if position is None:
        return (0, 0, *step.block_tables.fields)
    return (position.data_ptr(), position.element_size(), *step.block_tables.fields)


def _exponent(power: int) -> int:
    return power.bit_length() - 1


def _group_words(group_plan: GroupPlan, faults: torch.Tensor, powers: bool) -> list[int]:
    """A group's fields, with 0 for those of its table."""
    group = group_plan.group
    is_state = int(group.kind is GroupKind.STATE)
    sizes = [group.block_size, group.kernel_block_size]
    if powers:
        sizes = [_exponent(size) for size in sizes]
    words = [is_state, *sizes, group.num_blocks, group.first_block, faults.data_ptr(), 0, 0, 0, 0, 0]
    if isinstance(group_plan, PagedPlan):
        table, physical = group_plan.block_table, group_plan.physical_table
        words += [group_plan.slot.data_ptr(), table.data_ptr(), table.shape[1]]
        words += [0, 0] if physical is None else [physical.data_ptr(), physical.shape[1]]
    else:
        kept = group_plan.snapshots
        outputs = (group_plan.state_read, group_plan.state_write, kept.row, kept.offset, kept.slot)
        words += [values.data_ptr() for values in outputs]
    return words


def _make_room(kept: dict[Any, Any], limit: int) -> None:
    """Forget what has been kept longest where there are as many as the limit."""
    if len(kept) >= limit:
        del kept[next(iter(kept))]


def _is_capturing(arena: Arena) -> bool:
    return arena.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _check_not_capturing(arena: Arena, reason: str) -> None:
    if _is_capturing(arena):
        raise StepError("step in a graph capture", reason, "device lengths and tables that a fill outside has used")
