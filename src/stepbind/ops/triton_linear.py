"""Products of few rows with one weight or several, on the GPU, in one launch.

What they cost is the weights' way from memory. For one row a program holds its rows of a weight in registers, and all
of their loads are under way before it waits for x. For more rows matrix units do the sums (at 4 rows in two thirds of
the time that registers take, on an H200), with the weight on their left (64 of its rows are the least that they take
at full speed), and the sum over K is split so that the tiles fill the GPU once; the last program of a tile to arrive
adds the parts.

Several weights that are multiplied with the same x share a launch: each has its own programs, which do what they do in
a launch of their own, so that no number depends on what else a launch holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepbind.ops import triton_pdl
from stepbind.ops.linear import ARRIVALS, MAX_ROWS
from stepbind.ops.triton_pdl import ask_for, wait_for_inputs

LONGEST = 8192
"""Elements of a weight's row that the registers hold."""
SMALL = 2**17
"""Elements of a weight whose tiles need not fill the GPU: it costs a launch whatever is done, and next to nothing in a
launch that it shares."""
TILE, STEP = 64, 128
"""Weight rows, and elements of each, that matrix units take at once."""
STAGES = 6 if torch.version.hip is None else 2
"""Tiles under way, as far as the shared memory goes (AMD's is 64 KB)."""
STAGES_OF_TWO = 4 if torch.version.hip is None else 2
"""Tiles under way where a multiprocessor has to hold two programs (98 KB each at 32 rows)."""
STEPS_ASKED_FOR = 2
"""Steps of a program's weights that are on their way to the cache before it waits for x."""
FEWEST_PROGRAMS, MOST_PROGRAMS = 90, 132
"""Programs of one weight's tiles: they fill an H200's 132 multiprocessors once. Beyond that, libraries were as fast."""


def serves(rows: int, out_features: int, in_features: int) -> bool:
    """Whether these kernels take a product of x [rows, in_features]: shapes like those that gained, at 1 to 32 rows of
    bfloat16 on an H200."""
    if in_features % 16 or in_features > LONGEST or not 0 < rows <= MAX_ROWS:
        return False
    return rows == 1 or num_splits(out_features, in_features) > 0


def serves_together(rows: int, widths: tuple[int, ...], in_features: int) -> bool:
    """Whether weights [width, in_features] can share a launch: each is served, and there are counters for all."""
    if not all(serves(rows, width, in_features) for width in widths):
        return False
    return rows == 1 or sum(_counters(width, in_features) for width in widths) <= ARRIVALS


def num_splits(out_features: int, in_features: int) -> int:
    """Parts of the sum over in_features for matrix units: a power of 2; 0 where no number of parts fits."""
    if in_features % STEP:
        return 0
    tiles, splits = -(-out_features // TILE), 1
    while tiles * splits < FEWEST_PROGRAMS and in_features % (2 * splits * STEP) == 0:
        splits *= 2
    fits = tiles * splits >= FEWEST_PROGRAMS or out_features * in_features <= SMALL
    return splits if fits and tiles * splits <= MOST_PROGRAMS else 0


def _counters(out_features: int, in_features: int) -> int:
    """Counters of arrivals that a weight's tiles need: one each where sums are split."""
    return -(-out_features // TILE) if num_splits(out_features, in_features) > 1 else 0


def few_rows_linear(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
    arrived: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Arguments and results of `linear.joined_linear`, for shapes that `serves_together` accepts. One launch."""
    in_features, x = weights[0].shape[1], x.contiguous()
    rows = x.numel() // in_features
    outs = tuple(x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights)
    if rows == 1:
        _by_vectors(outs, x, weights, biases, in_features)
    else:
        _by_tiles(outs, x, weights, biases, arrived, rows, in_features)
    return outs


def _by_vectors(
    outs: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
    in_features: int,
) -> None:
    outputs, warps = _vector_tile(in_features)
    early = triton_pdl.launches_early(x.device)
    widths = tuple(weight.shape[0] for weight in weights)
    _multiply_vectors[(sum(-(-width // outputs) for width in widths),)](
        outs,
        x,
        weights,
        _or_weights(biases, weights),
        in_features,
        widths,
        tuple(bias is not None for bias in biases),
        outputs,
        triton.next_power_of_2(in_features),
        early,
        num_warps=warps,
        **triton_pdl.launch_options(early),
    )


def _by_tiles(
    outs: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
    arrived: torch.Tensor,
    rows: int,
    in_features: int,
) -> None:
    early = triton_pdl.launches_early(x.device)
    widths = tuple(weight.shape[0] for weight in weights)
    splits = tuple(num_splits(width, in_features) for width in widths)
    programs = sum(-(-width // TILE) * split for width, split in zip(widths, splits, strict=True))
    size = rows * sum(width * split for width, split in zip(widths, splits, strict=True) if split > 1)
    parts = x.new_empty(size, dtype=torch.float32) if size else x
    _multiply_tiles[(programs,)](
        outs,
        parts,
        arrived,
        x,
        weights,
        _or_weights(biases, weights),
        rows,
        widths,
        in_features,
        splits,
        tuple(bias is not None for bias in biases),
        max(16, triton.next_power_of_2(rows)),
        TILE,
        STEP,
        STAGES if programs <= MOST_PROGRAMS else STAGES_OF_TWO,
        STEPS_ASKED_FOR,
        early,
        num_warps=4,
        **triton_pdl.launch_options(early),
    )


def _or_weights(biases: tuple[torch.Tensor | None, ...], weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A pointer for every bias; those of weights are not read."""
    return tuple(weight if bias is None else bias for bias, weight in zip(biases, weights, strict=True))


def _vector_tile(in_features: int) -> tuple[int, int]:
    """Outputs and warps of one program, by the length of a weight's row (measured on an H200)."""
    if in_features <= 2048:
        return 2, 4
    return (8, 8) if in_features <= 4096 else (2, 8)


@triton.jit
def _multiply_vectors(
    outs,
    x,
    weights,
    biases,
    in_features,
    WIDTHS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has OUTPUTS outputs of one weight, of one row; weights come one after the other."""
    program = tl.program_id(0)
    for i in tl.static_range(len(WIDTHS)):
        programs = (WIDTHS[i] + OUTPUTS - 1) // OUTPUTS
        if (program >= 0) & (program < programs):
            _multiply_vector(
                outs[i],
                x,
                weights[i],
                biases[i],
                program,
                in_features,
                WIDTHS[i],
                HAS_BIAS[i],
                OUTPUTS,
                LENGTH,
                PDL,
            )
        program -= programs


@triton.jit
def _multiply_vector(
    out,
    x,
    weight,
    bias,
    program,
    in_features,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weights are asked for before the wait for x."""
    output, k = program * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, LENGTH)
    live = output < WIDTH
    at = output.to(tl.int64)[:, None] * in_features + k[None, :]
    inside = live[:, None] & (k < in_features)[None, :]
    w = tl.load(weight + at, mask=inside, other=0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    value = tl.load(x + k, mask=k < in_features, other=0)
    total = tl.sum(w.to(tl.float32) * value.to(tl.float32)[None, :], axis=1)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=live, other=0).to(tl.float32)
    tl.store(out + output, total.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_tiles(
    outs,
    parts,
    arrived,
    x,
    weights,
    biases,
    num_rows,
    WIDTHS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    ASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has TILE outputs of one weight, of all rows, from a part of the features; weights come one after the
    other. parts [splits, rows, width] and counters of arrivals follow each other for the weights with split sums."""
    program = tl.program_id(0)
    for i in tl.static_range(len(WIDTHS)):
        tiles = (WIDTHS[i] + TILE - 1) // TILE
        if (program >= 0) & (program < tiles * SPLITS[i]):
            _multiply_tile(
                outs[i],
                parts,
                arrived,
                x,
                weights[i],
                biases[i],
                program % tiles,
                program // tiles,
                num_rows,
                WIDTHS[i],
                IN_FEATURES,
                SPLITS[i],
                HAS_BIAS[i],
                ROWS,
                TILE,
                STEP,
                STAGES,
                ASKED,
                PDL,
            )
        program -= tiles * SPLITS[i]
        if SPLITS[i] > 1:
            parts += SPLITS[i] * WIDTHS[i] * num_rows
            arrived += tiles


@triton.jit
def _multiply_tile(
    out,
    parts,
    arrived,
    x,
    weight,
    bias,
    tile,
    split,
    num_rows,
    WIDTH: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    ASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first weights are asked for before the wait for x."""
    output, row = tile * TILE + tl.arange(0, TILE), tl.arange(0, ROWS)
    part_features: tl.constexpr = IN_FEATURES // SPLITS
    first = split * part_features
    k = first + tl.arange(0, STEP)
    w_at = weight + output.to(tl.int64)[:, None] * IN_FEATURES + k[None, :]
    x_at = x + row[:, None] * IN_FEATURES + k[None, :]
    live = output < WIDTH
    if PDL and ASKED > 0:
        line: tl.constexpr = 64  # elements of 16 bits in a cache line
        asked = first + tl.minimum(tl.arange(0, ASKED * STEP // line) * line, part_features - line)
        existing = tl.minimum(output, WIDTH - 1).to(tl.int64)
        ask_for(weight + existing[:, None] * IN_FEATURES + asked[None, :])
    wait_for_inputs(PDL)
    total = tl.zeros([TILE, ROWS], tl.float32)
    for start in tl.range(0, part_features, STEP, num_stages=STAGES):
        values = tl.load(x_at + start, mask=(row < num_rows)[:, None], other=0)
        w = tl.load(w_at + start, mask=live[:, None], other=0)
        total = tl.dot(w, values.T, total)
    total = total.T
    inside = (row < num_rows)[:, None] & live[None, :]
    at = row[:, None] * WIDTH + output[None, :]
    if SPLITS > 1:
        size = num_rows * WIDTH
        tl.store(parts + split * size + at, total, mask=inside)
        tl.debug_barrier()  # all of this program's part is written before it counts as arrived
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([ROWS, TILE], tl.float32)
            for part in tl.static_range(SPLITS):  # in order, so that the result does not depend on who came last
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
