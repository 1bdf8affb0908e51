"""The plan of a step on the GPU: one launch over (part of the step, cache group).

Kernels read one int64 array, the descriptor, whose fields are numbered here: where the step's values are, where the
plan's go, and what each group looks like. `fill_triton.py` writes it; `reference.py` says what the values mean.

Only ids inside a group's pool are ever written to a plan. Block tables get the columns that a row's context covers;
what stands behind them is left from earlier steps, and no op looks at columns behind a row's context.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Fields of the descriptor: first the step's, then GROUP_FIELDS for each group. Pointers are addresses, strides count
# elements. Where the lengths are is an argument: everything else waits for them, and a field is one load later.
ROTARY = tl.constexpr(0)  # the host's rotary positions, 0 = none given
ROTARY_BYTES = tl.constexpr(1)  # of one position
OUT_QUERY_START = tl.constexpr(2)
OUT_QUERY_LEN = tl.constexpr(3)
OUT_PRIOR_LEN = tl.constexpr(4)
OUT_CONTEXT_LEN = tl.constexpr(5)
OUT_HAS_PRIOR = tl.constexpr(6)
OUT_ROW_OF_TOKEN = tl.constexpr(7)
OUT_POSITION = tl.constexpr(8)
OUT_SPAN_START = tl.constexpr(9)
OUT_SPAN_END = tl.constexpr(10)
OUT_CHUNK_ROW = tl.constexpr(11)
OUT_CHUNK_INDEX = tl.constexpr(12)
FAULT_SEEN = tl.constexpr(13)  # where the host looks: its own memory
STEP_FIELDS = tl.constexpr(16)  # 128 bytes, a cache line, as GROUP_FIELDS are

IS_STATE = tl.constexpr(0)
BLOCK_SIZE = tl.constexpr(1)  # tokens
KERNEL_BLOCK_SIZE = tl.constexpr(2)  # tokens
NUM_BLOCKS = tl.constexpr(3)
FIRST_BLOCK = tl.constexpr(4)
FAULTS = tl.constexpr(5)
TABLE = tl.constexpr(6)
TABLE_ROW_STRIDE = tl.constexpr(7)
TABLE_COLUMN_STRIDE = tl.constexpr(8)
TABLE_COLUMNS = tl.constexpr(9)
IDS_PER_BLOCK = tl.constexpr(10)  # table entries (and ids) for one physical block: the ratio, or 1
OUT_SLOT = tl.constexpr(11)
OUT_TABLE = tl.constexpr(12)
OUT_TABLE_COLUMNS = tl.constexpr(13)  # also its row stride
OUT_PHYSICAL = tl.constexpr(14)  # 0 = none
OUT_PHYSICAL_COLUMNS = tl.constexpr(15)
OUT_STATE_READ = tl.constexpr(11)
OUT_STATE_WRITE = tl.constexpr(12)
OUT_SNAPSHOT_ROW = tl.constexpr(13)
OUT_SNAPSHOT_OFFSET = tl.constexpr(14)
OUT_SNAPSHOT_SLOT = tl.constexpr(15)
GROUP_FIELDS = tl.constexpr(16)


@triton.jit
def i32(desc, field):
    """A field as a number below 2**31."""
    return tl.load(desc + field).to(tl.int32)


@triton.jit
def int32(address):
    # An argument that fits has 32 bits: a Python that is no position-independent executable has its heap that low.
    return address.to(tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def int32_at(desc, field):
    return int32(tl.load(desc + field))


@triton.jit
def lengths(query_len, prior_len, row, num_rows):
    """query_len and prior_len of rows; 0 past the last one."""
    live = row < num_rows
    query = tl.load(int32(query_len) + row, mask=live, other=0)
    return query, tl.load(int32(prior_len) + row, mask=live, other=0)


@triton.jit
def divided(x, divisor, POWERS: tl.constexpr):
    """x // divisor, for x >= 0. With POWERS, `divisor` is a power's exponent: a division takes as long as a load."""
    return x >> divisor if POWERS else x // divisor


@triton.jit
def times(x, factor, POWERS: tl.constexpr):
    return x << factor if POWERS else x * factor


@triton.jit
def blocks(context, size, POWERS: tl.constexpr):
    """Blocks that so many tokens lie in."""
    return tl.where(context > 0, divided(context - 1, size, POWERS) + 1, 0)


@triton.jit
def table_fields(group, POWERS: tl.constexpr):
    """What finding and judging an entry of a group's table takes, loaded together and ahead of its use."""
    size, kernel_size, ids = i32(group, BLOCK_SIZE), i32(group, KERNEL_BLOCK_SIZE), i32(group, IDS_PER_BLOCK)
    table, columns = int32_at(group, TABLE), tl.load(group + TABLE_COLUMNS)
    row_stride, column_stride = tl.load(group + TABLE_ROW_STRIDE), tl.load(group + TABLE_COLUMN_STRIDE)
    first_block, num_blocks = i32(group, FIRST_BLOCK), i32(group, NUM_BLOCKS)
    # A table in kernel blocks has an entry for each; in one of physical blocks, `shared` of them share an entry.
    shared = size - kernel_size - ids if POWERS else size // kernel_size // ids
    return size, kernel_size, ids, shared, table, columns, row_stride, column_stride, first_block, num_blocks


@triton.jit
def physical_entry(table_of, row, column, wanted, POWERS: tl.constexpr):
    """Physical block at (row, column in physical blocks) where `wanted`, else -1; and whether the id is beyond the
    pool. -1 too where the table has no such column, and for ids outside the pool."""
    _, _, ids, _, table, columns, row_stride, column_stride, first_block, num_blocks = table_of
    table_column = times(column.to(tl.int64), ids, POWERS)
    inside = wanted & (column >= 0) & (table_column < columns)
    entry = tl.load(table + row.to(tl.int64) * row_stride + table_column * column_stride, mask=inside, other=-1)
    block = divided(entry, ids, POWERS)
    beyond = (entry < -1) | ((entry >= 0) & (block >= num_blocks))
    good = (entry >= 0) & (block >= first_block) & (block < num_blocks)
    return tl.where(good, block, -1), beyond


@triton.jit
def kernel_entry(table_of, row, column, wanted, POWERS: tl.constexpr):
    """Kernel block at (row, column in kernel blocks) where `wanted`, else -1."""
    _, _, ids, shared, table, columns, row_stride, column_stride, first_block, num_blocks = table_of
    table_column = divided(column, shared, POWERS)
    inside = wanted & (table_column < columns)
    at = row.to(tl.int64) * row_stride + table_column.to(tl.int64) * column_stride
    entry = tl.load(table + at, mask=inside, other=-1)
    block = divided(entry, ids, POWERS)
    good = (entry >= 0) & (block >= first_block) & (block < num_blocks)
    inner = column - times(table_column, shared, POWERS)
    return tl.where(good, times(entry, shared, POWERS) + inner, -1)


@triton.jit
def report(group, faults, row):
    """Count the faults of some rows, note the lowest row that has one, and tell the host. Nothing is summed or stored
    for rows without."""
    out = int32_at(group, FAULTS) + tl.zeros_like(row)
    seen = int32_at(group - tl.program_id(1) * GROUP_FIELDS - STEP_FIELDS, FAULT_SEEN) + tl.zeros_like(row)
    tl.atomic_add(out, faults, mask=faults > 0, sem="relaxed")
    tl.atomic_min(out + 1, row, mask=faults > 0, sem="relaxed")
    tl.store(seen, 1, mask=faults > 0)


@triton.jit
def store_tokens(desc, token, row, start, position, real, stored):
    """Shared values of tokens; those that are not real are padding."""
    rotary = tl.load(desc + ROTARY)
    value = position.to(tl.int64)
    if rotary != 0:
        if tl.load(desc + ROTARY_BYTES) == 8:
            value = tl.load(rotary.to(tl.pointer_type(tl.int64)) + token, mask=real & stored, other=0)
        else:
            value = tl.load(int32(rotary) + token, mask=real & stored, other=0).to(tl.int64)
    tl.store(int32_at(desc, OUT_ROW_OF_TOKEN) + token, tl.where(real, row, -1), mask=stored)
    out_position = tl.load(desc + OUT_POSITION).to(tl.pointer_type(tl.int64))
    tl.store(out_position + token, tl.where(real, value, 0), mask=stored)
    tl.store(int32_at(desc, OUT_SPAN_START) + token, tl.where(real, start, 0), mask=stored)
    tl.store(int32_at(desc, OUT_SPAN_END) + token, tl.where(real, token + 1, 0), mask=stored)


@triton.jit
def slots(table_of, row, position, real, POWERS: tl.constexpr):
    """Token slots in a paged group; -1 where there is no block, or no token."""
    kernel_size = table_of[1]
    column = divided(position, kernel_size, POWERS)
    block = kernel_entry(table_of, row, column, real, POWERS)
    offset = position - times(column, kernel_size, POWERS)
    return tl.where(block >= 0, times(block.to(tl.int64), kernel_size, POWERS) + offset, -1)


@triton.jit
def store_rows(desc, row, query, prior, start, padded_rows):
    """Shared values of rows; `start` is the index of each row's first token."""
    stored = row < padded_rows
    out_start = int32_at(desc, OUT_QUERY_START)
    tl.store(out_start + row, 0, mask=row == 0)
    tl.store(out_start + row + 1, start + query, mask=stored)
    tl.store(int32_at(desc, OUT_QUERY_LEN) + row, query, mask=stored)
    tl.store(int32_at(desc, OUT_PRIOR_LEN) + row, prior, mask=stored)
    tl.store(int32_at(desc, OUT_CONTEXT_LEN) + row, prior + query, mask=stored)
    has_prior = tl.load(desc + OUT_HAS_PRIOR).to(tl.pointer_type(tl.int8))
    tl.store(has_prior + row, (prior > 0).to(tl.int8), mask=stored)


@triton.jit
def store_tables(group, table_of, row, context, part, num_parts, COLUMNS: tl.constexpr, POWERS: tl.constexpr):
    """Every num_parts-th run of COLUMNS of the columns that the rows' contexts cover."""
    size, kernel_size = table_of[0], table_of[1]
    width, physical = i32(group, OUT_TABLE_COLUMNS), tl.load(group + OUT_PHYSICAL)
    out = int32_at(group, OUT_TABLE) + row.to(tl.int64)[:, None] * width
    covered = tl.minimum(blocks(context, kernel_size, POWERS), width)
    faults = tl.zeros_like(row)
    for first in range(part * COLUMNS, tl.max(covered, axis=0), num_parts * COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        wanted = column < covered[:, None]
        block = kernel_entry(table_of, row[:, None], column, wanted, POWERS)
        tl.store(out + column, block, mask=wanted)
        faults += tl.sum((wanted & (block < 0)).to(tl.int32), axis=1)
    report(group, faults, row)
    if physical != 0:
        width = i32(group, OUT_PHYSICAL_COLUMNS)
        covered = tl.minimum(blocks(context, size, POWERS), width)
        out = int32(physical) + row.to(tl.int64)[:, None] * width
        for first in range(part * COLUMNS, tl.max(covered, axis=0), num_parts * COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None, :]
            wanted = column < covered[:, None]
            block, _ = physical_entry(table_of, row[:, None], column, wanted, POWERS)
            tl.store(out + column, block, mask=wanted)


@triton.jit
def store_states(group, table_of, row, query, prior, padded_rows, VERIFY: tl.constexpr, POWERS: tl.constexpr):
    """Read and write slots of a state group."""
    size = table_of[0]
    read, _ = physical_entry(table_of, row, divided(prior - 1, size, POWERS), prior > 0, POWERS)
    if VERIFY:
        column = divided(prior, size, POWERS) + query - 1
    else:
        column = divided(prior + query - 1, size, POWERS)
    write, _ = physical_entry(table_of, row, column, query > 0, POWERS)
    tl.store(int32_at(group, OUT_STATE_READ) + row, read, mask=row < padded_rows)
    tl.store(int32_at(group, OUT_STATE_WRITE) + row, write, mask=row < padded_rows)
    bad = ((prior > 0) & (read < 0)) | ((query > 0) & (write < 0))
    report(group, bad.to(tl.int32), row)


@triton.jit(do_not_specialize=["query_len", "prior_len", "num_rows", "padded_rows", "padded_tokens"])
def fill_decode(
    desc,
    query_len,
    prior_len,
    num_rows,
    padded_rows,
    padded_tokens,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEARCH: tl.constexpr,
    POWERS: tl.constexpr,
    CONTEXTS: tl.constexpr,
):
    """A decode step: program (i, g, 0) has the values of rows and padding tokens i*ROWS .. for group g; program
    (i, g, 1+c) has every c-th part of those rows' table columns, which then wait for nothing in the values' way.
    Rows have one new token or none. query_len, prior_len: addresses, the latter with CONTEXTS of context lengths."""
    block, part = tl.program_id(0), tl.program_id(2) - 1
    has_values = tl.program_id(2) == 0
    is_first = tl.program_id(1) == 0
    group = desc + STEP_FIELDS + tl.program_id(1) * GROUP_FIELDS
    row = block * ROWS + tl.arange(0, ROWS)
    query, prior = lengths(query_len, prior_len, row, num_rows)
    if CONTEXTS:
        prior = tl.maximum(prior - query, 0)
    is_state = tl.load(group + IS_STATE)
    table_of = table_fields(group, POWERS)
    if is_state != 0:
        if has_values:
            store_states(group, table_of, row, query, prior, padded_rows, False, POWERS)
    elif part >= 0:
        store_tables(group, table_of, row, prior + query, part, tl.num_programs(2) - 1, COLUMNS, POWERS)
    if has_values & (is_first | (is_state == 0)):
        slot = tl.full((ROWS,), -1, tl.int64)
        if is_state == 0:
            slot = slots(table_of, row, prior, query > 0, POWERS)
        count = tl.zeros((SEARCH,), tl.int32)
        count_before = tl.zeros((SEARCH,), tl.int32)
        for first in range(0, num_rows, SEARCH):
            other = first + tl.arange(0, SEARCH)
            new = tl.load(int32(query_len) + other, mask=other < num_rows, other=0)
            count += new
            count_before += tl.where(other < block * ROWS, new, 0)
        start = tl.sum(count_before, axis=0) + tl.cumsum(query, axis=0) - query
        # A row's token stands at `start`; the program's padding tokens are those of its range past the last token.
        real = (query > 0) & (start < padded_tokens)
        padding = (row >= tl.sum(count, axis=0)) & (row < padded_tokens)
        nothing = query < 0
        if is_first:
            store_rows(desc, row, query, prior, start, padded_rows)
            store_tokens(desc, start, row, start, prior, real, real)
            store_tokens(desc, row, row, row, row, nothing, padding)
        if is_state == 0:
            out = tl.load(group + OUT_SLOT).to(tl.pointer_type(tl.int64))
            tl.store(out + start, slot, mask=real)
            tl.store(out + row, -1, mask=padding)
