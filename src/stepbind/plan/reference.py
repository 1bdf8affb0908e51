"""The plan in plain Python, to be checked by eye: loops over rows, tokens and columns, no tensors, no speed.

Tests hold every fast fill to this one. Values are nested lists; names are those of `plan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stepbind.groups import CacheGroup, GroupKind
from stepbind.plan.plan import CONV_CHUNK
from stepbind.step import BlockTable, Granularity, Lengths, Phase, Step


@dataclass
class ReferenceGroup:
    slot: list[int] = field(default_factory=list)
    block_table: list[list[int]] = field(default_factory=list)
    physical_table: list[list[int]] = field(default_factory=list)
    state_read: list[int] = field(default_factory=list)
    state_write: list[int] = field(default_factory=list)
    snapshots: list[tuple[int, int, int]] = field(default_factory=list)  # (row, offset, slot)
    faults: int = 0
    first_fault_row: int | None = None

    def fault(self, row: int) -> None:
        self.faults += 1
        self.first_fault_row = row if self.first_fault_row is None else min(row, self.first_fault_row)


NO_CHUNK = (-1, -1)


@dataclass
class ReferencePlan:
    query_start: list[int] = field(default_factory=list)
    query_len: list[int] = field(default_factory=list)
    prior_len: list[int] = field(default_factory=list)
    context_len: list[int] = field(default_factory=list)
    has_prior: list[bool] = field(default_factory=list)
    row_of_token: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    span_start: list[int] = field(default_factory=list)
    span_end: list[int] = field(default_factory=list)
    conv_chunks: list[tuple[int, int]] = field(default_factory=list)  # (row, chunk)
    groups: list[ReferenceGroup] = field(default_factory=list)


def reference_plan(step: Step) -> ReferencePlan:
    """All values of a step's plan. Host lengths are read, and device copies only where those are bounds."""
    plan = ReferencePlan()
    padding_rows = step.padded_rows - step.num_rows
    plan.query_len = _values(step, step.query_len) + [0] * padding_rows
    plan.prior_len = _values(step, step.prior_len) + [0] * padding_rows
    plan.query_start = [0]
    for row in range(step.padded_rows):
        q, n = plan.query_len[row], plan.prior_len[row]
        start = plan.query_start[-1]
        plan.query_start.append(start + q)
        plan.context_len.append(n + q)
        plan.has_prior.append(n > 0)
        for offset in range(q):
            plan.row_of_token.append(row)
            plan.position.append(n + offset)
            plan.span_start.append(start)
            plan.span_end.append(start + offset + 1)
        if step.phase is not Phase.DECODE:
            plan.conv_chunks += [(row, chunk) for chunk in range(-(-q // CONV_CHUNK))]
    live_tokens = plan.query_start[-1]
    if step.position is not None:
        plan.position = step.position[:live_tokens].tolist()
    for _ in range(step.padded_tokens - live_tokens):
        plan.row_of_token.append(-1)
        plan.position.append(0)
        plan.span_start.append(0)
        plan.span_end.append(0)
    plan.groups = [_group(step, plan, table) for table in step.tables]
    plan.conv_chunks += [NO_CHUNK] * (step.padded_chunks - len(plan.conv_chunks))
    if step.lengths_are_bounds:
        _pad_to_bounds(step, plan)
    return plan


def _values(step: Step, lengths: Lengths) -> list[int]:
    values = lengths.host
    if step.lengths_are_bounds and lengths.device is not None:
        values = lengths.device[: step.num_rows].cpu().numpy()
    return [int(value) for value in values]


def _pad_to_bounds(step: Step, plan: ReferencePlan) -> None:
    """Convolution chunks and snapshots are as many as the bounds allow; those that nobody needs have row -1."""
    bounds = step.query_len.host.tolist()
    if step.phase is Phase.DECODE:
        return
    chunks = sum(-(-bound // CONV_CHUNK) for bound in bounds)
    plan.conv_chunks += [NO_CHUNK] * (chunks - len(plan.conv_chunks))
    snapshots = sum(bound - 1 for bound in bounds)
    for table, group in zip(step.tables, plan.groups, strict=True):
        if table.group.kind is GroupKind.STATE:
            group.snapshots += [(-1, 0, -1)] * (snapshots - len(group.snapshots))


def _group(step: Step, plan: ReferencePlan, table: BlockTable) -> ReferenceGroup:
    if table.group.kind is GroupKind.STATE:
        return _state_group(step, plan, table)
    return _paged_group(step, plan, table)


def _paged_group(step: Step, plan: ReferencePlan, table: BlockTable) -> ReferenceGroup:
    group, out = table.group, ReferenceGroup()
    columns = -(-step.max_context // group.kernel_block_size)
    physical_columns = -(-step.max_context // group.block_size)
    for row in range(step.padded_rows):
        covered = -(-plan.context_len[row] // group.kernel_block_size)
        blocks = [kernel_block(table, row, c) if c < covered else -1 for c in range(columns)]
        for c in range(covered):
            if blocks[c] < 0:
                out.fault(row)
        out.block_table.append(blocks)
        if group.kind is GroupKind.LATENT:
            covered = -(-plan.context_len[row] // group.block_size)
            out.physical_table.append(
                [physical_block(table, row, c) if c < covered else -1 for c in range(physical_columns)]
            )
        for offset in range(plan.query_len[row]):
            token = plan.prior_len[row] + offset
            block = blocks[token // group.kernel_block_size]
            slot = block * group.kernel_block_size + token % group.kernel_block_size
            out.slot.append(slot if block >= 0 else -1)
    out.slot += [-1] * (step.padded_tokens - len(out.slot))
    return out


def _state_group(step: Step, plan: ReferencePlan, table: BlockTable) -> ReferenceGroup:
    out, size = ReferenceGroup(), table.group.block_size
    for row in range(step.padded_rows):
        q, n = plan.query_len[row], plan.prior_len[row]
        read = write = -1
        if n > 0:
            read = physical_block(table, row, (n - 1) // size)
            if read < 0:
                out.fault(row)
        if q > 0:
            column = n // size + q - 1 if step.phase is Phase.VERIFY else (n + q - 1) // size
            write = physical_block(table, row, column)
            if write < 0 and not (n > 0 and read < 0):  # one fault a row
                out.fault(row)
        out.state_read.append(read)
        out.state_write.append(write)
        if step.phase is Phase.DECODE:
            continue
        for offset in range(1, q):  # the state after `offset` new tokens
            if step.phase is Phase.VERIFY:
                column = n // size + offset - 1
            elif (n + offset) % size == 0:
                column = (n + offset) // size - 1
            else:
                continue
            out.snapshots.append((row, offset, physical_block(table, row, column)))
            if id_beyond_pool(table, row, column):
                out.fault(row)
    return out


def physical_block(table: BlockTable, row: int, column: int) -> int:
    """Physical block of a column in physical blocks, -1 = none."""
    ratio = table.group.ratio if table.granularity is Granularity.KERNEL else 1
    if column * ratio >= table.blocks.shape[1]:
        return -1
    block = int(table.blocks[row, column * ratio]) // ratio
    return block if _in_pool(table.group, block) else -1


def kernel_block(table: BlockTable, row: int, column: int) -> int:
    """Kernel block of a column in kernel blocks, -1 = none."""
    ratio = table.group.ratio
    if table.granularity is Granularity.PHYSICAL:
        physical = physical_block(table, row, column // ratio)
        return physical * ratio + column % ratio if physical >= 0 else -1
    block = int(table.blocks[row, column])
    return block if _in_pool(table.group, block // ratio) else -1


def id_beyond_pool(table: BlockTable, row: int, column: int) -> bool:
    """Whether the entry is neither a block of the pool, nor a reserved one, nor -1."""
    ratio = table.group.ratio if table.granularity is Granularity.KERNEL else 1
    entry = int(table.blocks[row, column * ratio])
    return entry < -1 or entry // ratio >= table.group.num_blocks


def _in_pool(group: CacheGroup, block: int) -> bool:
    return group.first_block <= block < group.num_blocks
