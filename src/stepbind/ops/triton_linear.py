"""Products of few rows with a weight, on the GPU.

What they cost is the weight's way from memory. For one to four rows a program holds its rows of the weight in
registers, and all of their loads are under way before it waits for x. For more rows matrix units do the sums, with the
weight on their left (64 of its rows are the least that they take at full speed), and the sum over K is split so that
the tiles fill the GPU once; the last program of a tile to arrive adds the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepbind.ops import triton_pdl
from stepbind.ops.linear import MAX_ROWS
from stepbind.ops.triton_pdl import wait_for_inputs

VECTOR_ROWS = 4
"""Rows of x that one program multiplies with the weights in its registers."""
LONGEST = 8192
"""Elements of a weight's row that the registers hold."""
SMALL = 2**17
"""Elements of a weight that is so small that blocks of VECTOR_ROWS rows may read it again and again, from the cache
(a thought, not a measurement; the library's product takes 5 us for 32 x 2048)."""
TILE, STEP = 64, 128
"""Weight rows, and elements of each, that matrix units take at once."""
STAGES = 6 if torch.version.hip is None else 2
"""Tiles under way, as far as the shared memory goes (AMD's is 64 KB)."""
FEWEST_PROGRAMS, MOST_PROGRAMS = 90, 132
"""Programs of matrix products: they fill an H200's 132 multiprocessors once. Beyond that, libraries were as fast."""


def serves(rows: int, out_features: int, in_features: int) -> bool:
    """Whether these kernels take a product of x [rows, in_features]: shapes like those that gained, at 1 and 32 rows of
    bfloat16 on an H200."""
    if in_features % 16 or in_features > LONGEST or not 0 < rows <= MAX_ROWS:
        return False
    return _by_vectors(rows, out_features * in_features) or num_splits(out_features, in_features) > 0


def _by_vectors(rows: int, elements: int) -> bool:
    return rows <= VECTOR_ROWS or elements <= SMALL


def num_splits(out_features: int, in_features: int) -> int:
    """Parts of the sum over in_features for matrix units: a power of 2; 0 where no number of parts fits."""
    if in_features % STEP:
        return 0
    tiles, splits = -(-out_features // TILE), 1
    while tiles * splits < FEWEST_PROGRAMS and in_features % (2 * splits * STEP) == 0:
        splits *= 2
    return splits if FEWEST_PROGRAMS <= tiles * splits <= MOST_PROGRAMS else 0


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor
) -> torch.Tensor:
    """Arguments and result of `linear.few_rows_linear`, for shapes that `serves` accepts. One launch."""
    (out_features, in_features), x = weight.shape, x.contiguous()
    rows = x.numel() // in_features
    out = x.new_empty((*x.shape[:-1], out_features))
    early = triton_pdl.launches_early(x.device)
    bias_or_weight = weight if bias is None else bias
    if _by_vectors(rows, weight.numel()):
        outputs, warps = _vector_tile(in_features)
        _multiply_vectors[(-(-out_features // outputs), -(-rows // VECTOR_ROWS))](
            out,
            x,
            weight,
            bias_or_weight,
            rows,
            out_features,
            in_features,
            min(rows, VECTOR_ROWS),
            outputs,
            triton.next_power_of_2(in_features),
            bias is not None,
            early,
            num_warps=warps,
            **triton_pdl.launch_options(early),
        )
        return out
    tiles, splits = -(-out_features // TILE), num_splits(out_features, in_features)
    parts = x.new_empty((splits, rows, out_features), dtype=torch.float32) if splits > 1 else out
    _multiply_tiles[(tiles, splits)](
        out,
        parts,
        arrived,
        x,
        weight,
        bias_or_weight,
        rows,
        out_features,
        in_features,
        in_features // splits,
        max(16, triton.next_power_of_2(rows)),
        TILE,
        STEP,
        STAGES,
        splits > 1,
        bias is not None,
        early,
        num_warps=4,
        **triton_pdl.launch_options(early),
    )
    return out


def _vector_tile(in_features: int) -> tuple[int, int]:
    """Outputs and warps of one program, by the length of a weight's row (measured on an H200)."""
    if in_features <= 2048:
        return 2, 4
    return (8, 8) if in_features <= 4096 else (2, 8)


@triton.jit(do_not_specialize=["num_rows", "out_features"])
def _multiply_vectors(
    out,
    x,
    weight,
    bias,
    num_rows,
    out_features,
    in_features,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, m): OUTPUTS outputs of ROWS rows. The weights are asked for before the wait for x."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, WIDTH)
    live = output < out_features
    at = output.to(tl.int64)[:, None] * in_features + k[None, :]
    inside = live[:, None] & (k < in_features)[None, :]
    w = tl.load(weight + at, mask=inside, other=0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    for m in tl.static_range(ROWS):
        row = tl.program_id(1) * ROWS + m
        here = tl.where(row < num_rows, in_features, 0)
        value = tl.load(x + row * in_features + k, mask=k < here, other=0)
        total = tl.sum(w.to(tl.float32) * value.to(tl.float32)[None, :], axis=1)
        if HAS_BIAS:
            total += tl.load(bias + output, mask=live, other=0).to(tl.float32)
        there = tl.where(row < num_rows, out_features, 0)
        tl.store(out + row * out_features + output, total.to(out.dtype.element_ty), mask=output < there)


@triton.jit(do_not_specialize=["num_rows", "out_features"])
def _multiply_tiles(
    out,
    parts,
    arrived,
    x,
    weight,
    bias,
    num_rows,
    out_features,
    in_features,
    part_features,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, s): TILE outputs of all rows, from the s-th part of the features."""
    wait_for_inputs(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    output, row = tile * TILE + tl.arange(0, TILE), tl.arange(0, ROWS)
    k = split * part_features + tl.arange(0, STEP)
    w_at = weight + output.to(tl.int64)[:, None] * in_features + k[None, :]
    x_at = x + row[:, None] * in_features + k[None, :]
    live = output < out_features
    total = tl.zeros([TILE, ROWS], tl.float32)
    for start in tl.range(0, part_features, STEP, num_stages=STAGES):
        values = tl.load(x_at + start, mask=(row < num_rows)[:, None], other=0)
        w = tl.load(w_at + start, mask=live[:, None], other=0)
        total = tl.dot(w, values.T, total)
    total = total.T
    inside = (row < num_rows)[:, None] & live[None, :]
    at = row[:, None] * out_features + output[None, :]
    if IS_SPLIT:
        size = num_rows * out_features
        tl.store(parts + split * size + at, total, mask=inside)
        tl.debug_barrier()  # all of this program's part is written before it counts as arrived
        splits = tl.num_programs(1)
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros([ROWS, TILE], tl.float32)
            for part in range(splits):  # in order, so that the result does not depend on who came last
                total += tl.load(parts + part * size + at, mask=inside, other=0, cache_modifier=".cg")
            _store_tile(out, bias, at, output, total, inside, live, HAS_BIAS)
            tl.store(arrived + tile, 0)
    else:
        _store_tile(out, bias, at, output, total, inside, live, HAS_BIAS)


@triton.jit
def _store_tile(out, bias, at, output, total, inside, live, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + output, mask=live, other=0).to(tl.float32)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
