"""The plan of a prefill or verify step on the GPU: rows with any number of new tokens, found by searching."""

from __future__ import annotations

import triton
import triton.language as tl

from stepbind.plan.fill_kernels import (
    GROUP_FIELDS,
    IS_STATE,
    OUT_CHUNK_INDEX,
    OUT_CHUNK_ROW,
    OUT_SLOT,
    OUT_SNAPSHOT_OFFSET,
    OUT_SNAPSHOT_ROW,
    OUT_SNAPSHOT_SLOT,
    STEP_FIELDS,
    divided,
    int32_at,
    lengths,
    physical_entry,
    report,
    slots,
    store_rows,
    store_states,
    store_tables,
    store_tokens,
    table_fields,
    times,
)
from stepbind.plan.plan import CONV_CHUNK

# What a search through the rows counts in each of them.
COUNT_TOKENS = tl.constexpr(0)
COUNT_CONV_CHUNKS = tl.constexpr(1)
COUNT_BOUNDARIES = tl.constexpr(2)
COUNT_DRAFTS = tl.constexpr(3)

_CONV_CHUNK = tl.constexpr(CONV_CHUNK)


@triton.jit
def _find_rows(
    query_len, prior_len, index, num_rows, block_size, WHAT: tl.constexpr, ROWS: tl.constexpr, POWERS: tl.constexpr
):
    """For items laid out row after row: the row of each `index`, the index of that row's first item, and how many
    items there are. An index past the last item gets a row past the last one."""
    row = tl.zeros_like(index)
    start = tl.zeros_like(index)
    total = 0
    for first in range(0, num_rows, ROWS):
        query, prior = lengths(query_len, prior_len, first + tl.arange(0, ROWS), num_rows)
        if WHAT == COUNT_TOKENS:
            count = query
        elif WHAT == COUNT_CONV_CHUNKS:
            count = (query + _CONV_CHUNK - 1) // _CONV_CHUNK
        elif WHAT == COUNT_BOUNDARIES:
            last = divided(prior + query - 1, block_size, POWERS)
            count = tl.where(query > 0, last - divided(prior, block_size, POWERS), 0)
        else:
            count = tl.maximum(query - 1, 0)
        end = total + tl.cumsum(count, axis=0)
        passed = end[None, :] <= index[:, None]
        row += tl.sum(passed.to(tl.int32), axis=1)
        start = tl.maximum(start, tl.max(tl.where(passed, end[None, :], 0), axis=1))
        total += tl.sum(count, axis=0)
    return row, start, total


@triton.jit
def _fill_tokens(
    desc, group, query_len, prior_len, is_first, is_state, block, num_rows, padded_tokens, TOKENS, SEARCH, POWERS
):
    token = block * TOKENS + tl.arange(0, TOKENS)
    row, start, total = _find_rows(query_len, prior_len, token, num_rows, 1, COUNT_TOKENS, SEARCH, POWERS)
    real = token < total
    _, prior = lengths(query_len, prior_len, row, num_rows)
    position = prior + token - start
    stored = token < padded_tokens
    if is_first:
        store_tokens(desc, token, row, start, position, real, stored)
    if is_state == 0:
        out = tl.load(group + OUT_SLOT).to(tl.pointer_type(tl.int64))
        tl.store(out + token, slots(table_fields(group, POWERS), row, position, real, POWERS), mask=stored)


@triton.jit
def _fill_rows(
    desc,
    group,
    query_len,
    prior_len,
    is_first,
    is_state,
    block,
    part,
    num_parts,
    num_rows,
    padded_rows,
    ROWS,
    COLUMNS,
    SEARCH,
    VERIFY,
    POWERS,
):
    row = block * ROWS + tl.arange(0, ROWS)
    query, prior = lengths(query_len, prior_len, row, num_rows)
    if is_first & (part == 0):
        before = 0
        for first in range(0, block * ROWS, SEARCH):
            other = first + tl.arange(0, SEARCH)
            count, _ = lengths(query_len, prior_len, other, num_rows)
            before += tl.sum(tl.where(other < block * ROWS, count, 0), axis=0)
        store_rows(desc, row, query, prior, before + tl.cumsum(query, axis=0) - query, padded_rows)
    table_of = table_fields(group, POWERS)
    if is_state == 0:
        store_tables(group, table_of, row, prior + query, part, num_parts, COLUMNS, POWERS)
    elif part == 0:
        store_states(group, table_of, row, query, prior, padded_rows, VERIFY, POWERS)


@triton.jit
def _fill_chunks(desc, query_len, prior_len, block, num_rows, num_chunks, TOKENS, SEARCH, POWERS):
    index = block * TOKENS + tl.arange(0, TOKENS)
    row, start, total = _find_rows(query_len, prior_len, index, num_rows, 1, COUNT_CONV_CHUNKS, SEARCH, POWERS)
    real = index < total
    tl.store(int32_at(desc, OUT_CHUNK_ROW) + index, tl.where(real, row, -1), mask=index < num_chunks)
    tl.store(int32_at(desc, OUT_CHUNK_INDEX) + index, tl.where(real, index - start, -1), mask=index < num_chunks)


@triton.jit
def _fill_snapshots(group, query_len, prior_len, block, num_rows, num_snapshots, TOKENS, SEARCH, VERIFY, POWERS):
    index = block * TOKENS + tl.arange(0, TOKENS)
    table_of = table_fields(group, POWERS)
    size = table_of[0]
    if VERIFY:
        row, start, total = _find_rows(query_len, prior_len, index, num_rows, size, COUNT_DRAFTS, SEARCH, POWERS)
    else:
        row, start, total = _find_rows(query_len, prior_len, index, num_rows, size, COUNT_BOUNDARIES, SEARCH, POWERS)
    real = index < total
    _, prior = lengths(query_len, prior_len, row, num_rows)
    column = divided(prior, size, POWERS) + index - start
    if VERIFY:
        offset = index - start + 1
    else:
        offset = times(column + 1, size, POWERS) - prior
    slot, beyond = physical_entry(table_of, row, column, real, POWERS)
    # A group that has fewer snapshots than the longest one owns the rest of its buffer too, up to `num_snapshots`.
    stored = index < num_snapshots
    tl.store(int32_at(group, OUT_SNAPSHOT_ROW) + index, tl.where(real, row, -1), mask=stored)
    tl.store(int32_at(group, OUT_SNAPSHOT_OFFSET) + index, tl.where(real, offset, 0), mask=stored)
    tl.store(int32_at(group, OUT_SNAPSHOT_SLOT) + index, slot, mask=stored)
    # A boundary without a block is the host's choice; an id that no pool has is a fault.
    report(group, (real & beyond).to(tl.int32), row)


@triton.jit(
    do_not_specialize=[
        "query_len",
        "prior_len",
        "num_rows",
        "padded_rows",
        "padded_tokens",
        "num_chunks",
        "num_snapshots",
        "row_blocks",
        "parts",
    ]
)
def fill_ragged(
    desc,
    query_len,
    prior_len,
    num_rows,
    padded_rows,
    padded_tokens,
    num_chunks,
    num_snapshots,
    row_blocks,
    parts,
    VERIFY: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEARCH: tl.constexpr,
    POWERS: tl.constexpr,
):
    """A prefill or verify step: program (i, g) has one of these of group g, in this order: TOKENS tokens; ROWS rows
    and every parts-th part of their table columns; TOKENS convolution chunks; TOKENS snapshots.

    query_len, prior_len: addresses. num_chunks, num_snapshots: entries of the lists, the latter of the group that has
    most. Those past the last one get row -1.
    """
    group = desc + STEP_FIELDS + tl.program_id(1) * GROUP_FIELDS
    is_first = tl.program_id(1) == 0
    is_state = tl.load(group + IS_STATE)
    block = tl.program_id(0)
    token_blocks = (padded_tokens + TOKENS - 1) // TOKENS
    chunk_blocks = (num_chunks + TOKENS - 1) // TOKENS
    if block < token_blocks:
        if is_first | (is_state == 0):
            _fill_tokens(
                desc,
                group,
                query_len,
                prior_len,
                is_first,
                is_state,
                block,
                num_rows,
                padded_tokens,
                TOKENS,
                SEARCH,
                POWERS,
            )
    elif block < token_blocks + row_blocks * parts:
        block -= token_blocks
        _fill_rows(
            desc,
            group,
            query_len,
            prior_len,
            is_first,
            is_state,
            block // parts,
            block % parts,
            parts,
            num_rows,
            padded_rows,
            ROWS,
            COLUMNS,
            SEARCH,
            VERIFY,
            POWERS,
        )
    elif block < token_blocks + row_blocks * parts + chunk_blocks:
        if is_first:
            block -= token_blocks + row_blocks * parts
            _fill_chunks(desc, query_len, prior_len, block, num_rows, num_chunks, TOKENS, SEARCH, POWERS)
    elif is_state != 0:
        block -= token_blocks + row_blocks * parts + chunk_blocks
        _fill_snapshots(group, query_len, prior_len, block, num_rows, num_snapshots, TOKENS, SEARCH, VERIFY, POWERS)
