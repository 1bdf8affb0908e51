"""The plan of a step in plain torch operations, vectorised over rows and tokens; `reference.py` says it slowly.

Sizes come from host lengths and values from device tensors, so that nothing here reads a device value back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepbind.groups import CacheGroup
from stepbind.plan.arena import Arena, conv_items
from stepbind.plan.plan import CONV_CHUNK, PagedPlan, Plan, Shared, StatePlan
from stepbind.step import BlockTable, Granularity, Lengths, Phase, Step


def fill_torch(step: Step, plan: Plan, arena: Arena) -> None:
    """Write all values of `plan`, which is `plan_views(arena, step)`. Faults are added to `arena.faults`."""
    _fill_shared(step, plan.shared)
    faults = [
        _fill_paged(step, plan.shared, table, group_plan)
        if isinstance(group_plan, PagedPlan)
        else _fill_state(step, plan.shared, table, group_plan)
        for table, group_plan in zip(step.tables, plan.groups, strict=True)
    ]
    arena.fault_counts.add(torch.stack(faults))


def _fill_shared(step: Step, shared: Shared) -> None:
    rows, tokens = step.num_rows, step.num_tokens
    for lengths, out in ((step.query_len, shared.query_len), (step.prior_len, shared.prior_len)):
        out[:rows] = _on_device(lengths, rows, step.device)
        out[rows:] = 0
    if step.contexts_on_device:
        shared.prior_len.sub_(shared.query_len)
    torch.add(shared.query_len, shared.prior_len, out=shared.context_len)
    torch.gt(shared.prior_len, 0, out=shared.has_prior)
    shared.query_start[0] = 0
    torch.cumsum(shared.query_len, dim=0, dtype=torch.int32, out=shared.query_start[1:])

    token = _Items.of(shared.query_len[:rows], tokens)
    position = shared.prior_len[token.row] + token.offset if step.position is None else step.position[:tokens]
    for out, value, padding in (
        (shared.row_of_token, token.row, -1),
        (shared.span_start, shared.query_start[token.row], 0),
        (shared.span_end, torch.arange(1, tokens + 1, device=step.device), 0),
        (shared.position, position, 0),
    ):
        out[:tokens] = torch.where(token.real, value, padding)
        out[tokens:] = padding
    _fill_conv_chunks(step, shared)


def _fill_conv_chunks(step: Step, shared: Shared) -> None:
    count = conv_items(step)
    if count == 0:
        return
    chunks = (shared.query_len[: step.num_rows] + (CONV_CHUNK - 1)) // CONV_CHUNK
    chunk = _Items.of(chunks, count)
    shared.conv_chunk_row.copy_(torch.where(chunk.real, chunk.row, -1))
    shared.conv_chunk_index.copy_(torch.where(chunk.real, chunk.offset, -1))


def _fill_paged(step: Step, shared: Shared, table: BlockTable, group_plan: PagedPlan) -> torch.Tensor:
    """Returns the faults of each row [B]."""
    group, rows, tokens = table.group, step.num_rows, step.num_tokens
    kernel_blocks = _at_kernel_granularity(table, rows, group_plan.block_table.shape[1])
    faults = _store_table(group_plan.block_table, kernel_blocks, shared, group.kernel_block_size)
    if group_plan.physical_table is not None:
        physical = _at_physical_granularity(table, rows, group_plan.physical_table.shape[1])
        _store_table(group_plan.physical_table, physical, shared, group.block_size)

    row = shared.row_of_token[:tokens].long()
    real, row = row >= 0, row.clamp(min=0)
    token = (shared.prior_len[row] + torch.arange(tokens, device=step.device) - shared.query_start[row]).long()
    column = torch.where(real, token // group.kernel_block_size, 0)
    real &= column < group_plan.block_table.shape[1]
    block = group_plan.block_table[row, torch.where(real, column, 0)].long()
    slot = block * group.kernel_block_size + token % group.kernel_block_size
    group_plan.slot[:tokens] = torch.where(real & (block >= 0), slot, -1)
    group_plan.slot[tokens:] = -1
    return faults


def _store_table(out: torch.Tensor, blocks: torch.Tensor, shared: Shared, size: int) -> torch.Tensor:
    """Copy the entries that a row's context covers into `out` [Bp, C]; everything else becomes -1. Returns how many of
    the covered ones are none, for each row [B]."""
    rows = blocks.shape[0]
    column = torch.arange(out.shape[1], device=out.device)
    covered = column < ((shared.context_len[:rows, None] + (size - 1)) // size)
    out[:rows] = torch.where(covered, blocks, -1)
    out[rows:] = -1
    return (covered & (blocks < 0)).sum(dim=1)


def _fill_state(step: Step, shared: Shared, table: BlockTable, group_plan: StatePlan) -> torch.Tensor:
    """Returns the faults of each row [B]."""
    group, rows = table.group, step.num_rows
    prior, query = shared.prior_len[:rows], shared.query_len[:rows]
    if step.phase is Phase.VERIFY:
        write_column = prior // group.block_size + query - 1
    else:
        write_column = (prior + query - 1) // group.block_size
    read, _ = _lookup(table, None, (prior - 1).div(group.block_size, rounding_mode="floor"))
    write, _ = _lookup(table, None, torch.where(query > 0, write_column, -1))
    group_plan.state_read[:rows] = read
    group_plan.state_read[rows:] = -1
    group_plan.state_write[:rows] = write
    group_plan.state_write[rows:] = -1
    missing = ((prior > 0) & (read < 0)) | ((query > 0) & (write < 0))
    if group_plan.snapshots.row.shape[0] == 0:
        return missing.long()
    return missing + _fill_snapshots(step, shared, table, group_plan)


def _fill_snapshots(step: Step, shared: Shared, table: BlockTable, group_plan: StatePlan) -> torch.Tensor:
    """Returns the faults of each row [B]: a boundary without a block is the host's choice, an id beyond the pool is
    not."""
    snapshots, group, rows = group_plan.snapshots, table.group, step.num_rows
    prior, query = shared.prior_len[:rows], shared.query_len[:rows]
    if step.phase is Phase.VERIFY:
        per_row = query - 1
    else:
        per_row = (prior + query - 1) // group.block_size - prior // group.block_size
    item = _Items.of(per_row.clamp(min=0), snapshots.row.shape[0])
    column = prior[item.row] // group.block_size + item.offset
    if step.phase is Phase.VERIFY:
        offset = item.offset + 1
    else:
        offset = (column + 1) * group.block_size - prior[item.row]
    slot, beyond = _lookup(table, item.row, torch.where(item.real, column, -1))
    snapshots.row.copy_(torch.where(item.real, item.row, -1))
    snapshots.offset.copy_(torch.where(item.real, offset, 0))
    snapshots.slot.copy_(slot)
    return torch.zeros(rows, dtype=torch.int64, device=step.device).index_add_(0, item.row, beyond.long())


def _lookup(table: BlockTable, row: torch.Tensor | None, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical blocks at (row, column) of a table, column in physical blocks; row None means 0, 1, 2, ...

    Returns the ids, -1 where the column or the id is none, and where an id is beyond the pool.
    """
    if row is None:
        row = torch.arange(column.shape[0], device=column.device)
    factor = table.group.ratio if table.granularity is Granularity.KERNEL else 1
    inside = (column >= 0) & (column * factor < table.blocks.shape[1])
    safe_column = torch.where(inside, column * factor, 0)
    entry = torch.where(inside, table.blocks[row, safe_column], -1)
    block = entry.div(factor, rounding_mode="floor")
    beyond = (block >= table.group.num_blocks) | (entry < -1)
    return _none_outside_pool(block, table.group), beyond


def _at_kernel_granularity(table: BlockTable, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] int32 kernel block ids of a table at either granularity, -1 = none."""
    group = table.group
    if table.granularity is Granularity.KERNEL:
        blocks = table.blocks[:rows, :columns]
        owned = _none_outside_pool(blocks.div(group.ratio, rounding_mode="floor"), group) >= 0
        return torch.where(owned, blocks, -1)
    physical = _none_outside_pool(table.blocks[:rows, : -(-columns // group.ratio)], group)
    inner = torch.arange(group.ratio, dtype=torch.int32, device=physical.device)
    kernel = torch.where(physical[..., None] >= 0, physical[..., None] * group.ratio + inner, -1)
    return kernel.flatten(1)[:, :columns]


def _at_physical_granularity(table: BlockTable, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] int32 physical block ids of a table at either granularity, -1 = none.

    A physical block's id is that of its first kernel block divided by the ratio (reference behaviour 4).
    """
    group = table.group
    if table.granularity is Granularity.PHYSICAL:
        return _none_outside_pool(table.blocks[:rows, :columns], group)
    first = table.blocks[:rows, : columns * group.ratio : group.ratio]
    return _none_outside_pool(first.div(group.ratio, rounding_mode="floor"), group)


def _none_outside_pool(physical: torch.Tensor, group: CacheGroup) -> torch.Tensor:
    inside = (physical >= group.first_block) & (physical < group.num_blocks)
    return torch.where(inside, physical, -1)


@dataclass(frozen=True, eq=False)
class _Items:
    """N items laid out row after row. `row` [N] int64 and `offset` [N] int64 of each within its row; `real` [N] bool is
    False behind the last one, where the row is any and the offset means nothing."""

    row: torch.Tensor
    offset: torch.Tensor
    real: torch.Tensor

    @staticmethod
    def of(counts: torch.Tensor, total: int) -> _Items:
        """`total` items, of which row r has counts[r]; there may be fewer."""
        end = counts.cumsum(0)
        index = torch.arange(total, device=counts.device)
        row = torch.searchsorted(end, index, right=True)
        real = row < counts.shape[0]
        row = row.clamp(max=counts.shape[0] - 1)
        return _Items(row, index - (end - counts)[row], real)


def _on_device(lengths: Lengths, rows: int, device: torch.device) -> torch.Tensor:
    if lengths.device is not None:
        return lengths.device[:rows]
    host = torch.from_numpy(lengths.host)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
