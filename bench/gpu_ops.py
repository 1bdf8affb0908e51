"""Each GPU op of one layer: checked against the CPU in float32, and timed inside a graph against its floor.

    python bench/gpu_ops.py

Shapes are those of a 1.76B Qwen3-Next style model: 16 query heads of 256 over 2 KV heads, 16 heads of 128 with their
recurrent states, bf16. The floor of decode is the bytes that an op must move over the bandwidth of a large copy,
measured in the same run; that of prefill attention, its products over a large matrix product's rate. Works go round
as many layers as the model has, on buffers of their own. Prints tables, asserts nothing but equality.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_timing import copy_bytes_per_us, graph_us, host_us, machine, require_gpu

from stepbind.caches import KVPages
from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops import fla_gated_delta
from stepbind.ops.attention import paged_attention
from stepbind.ops.cache_write import write_kv
from stepbind.ops.causal_conv import causal_conv
from stepbind.ops.decay import Decay
from stepbind.ops.gated_delta import gated_delta
from stepbind.plan import PagedPlan, Plan, StatePlan, build_plan, make_arena
from stepbind.step import Phase, make_step

HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 2, 256, 64
LINEAR_HEADS, LINEAR_DIM, WIDTH = 16, 128, 4
CHANNELS = 3 * LINEAR_HEADS * LINEAR_DIM
ATTENTION_LAYERS, LINEAR_LAYERS = 6, 18
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Setting:
    """A step's plan on the GPU and on the CPU."""

    gpu: Plan
    cpu: Plan
    rows: int
    tokens: int
    blocks: int  # attention blocks

    @staticmethod
    def of(phase: Phase, rows: int, query: int, prior: int) -> Setting:
        columns = -(-(query + prior) // PAGE)
        blocks = rows * columns + 1
        attention = CacheGroup("attention", GroupKind.ATTENTION, (0,), PAGE, PAGE, blocks)
        # One state a row, whatever its length: what is timed is a step that stays within a block.
        state = CacheGroup("state", GroupKind.STATE, (1,), 2**20, 2**20, rows + 1)
        tables = {
            "attention": (torch.randperm(blocks - 1, dtype=torch.int32) + 1).reshape(rows, columns),
            "state": (torch.randperm(rows, dtype=torch.int32) + 1).reshape(rows, 1),
        }

        def plan(device: str) -> Plan:
            there = {name: table.to(device) for name, table in tables.items()}
            step = make_step((attention, state), phase, [query] * rows, [prior] * rows, there)
            arena = make_arena(
                step.groups, max_rows=rows, max_tokens=rows * query, max_context=query + prior, device=device
            )
            return build_plan(step, arena, strict=True)

        return Setting(plan("cuda"), plan("cpu"), rows, rows * query, blocks)


Run = Callable[[str, Plan], list[torch.Tensor]]
"""Runs an op of one layer on a device, on that layer's own tensors; returns its output and what it wrote."""


@dataclass(frozen=True)
class Op:
    name: str
    layers: list[Run]
    floor_bytes: float
    flops: float = 0.0


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, device="cuda").to(dtype)


def seen_by(device: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors themselves on the GPU; float32 copies on the CPU."""
    return tensors if device == "cuda" else [tensor.float().cpu() for tensor in tensors]


def attention_op(setting: Setting, context: int, count: int) -> list[Op]:
    tokens = setting.tokens

    def layer(kind: str) -> Run:
        tensors = [
            randn(setting.blocks, 2, KV_HEADS, PAGE, HEAD_DIM),
            randn(tokens, HEADS, HEAD_DIM),
            randn(tokens, KV_HEADS, HEAD_DIM),
            randn(tokens, KV_HEADS, HEAD_DIM),
        ]

        def run(device: str, plan: Plan) -> list[torch.Tensor]:
            buffer, query, key, value = seen_by(device, tensors)
            pages, group = KVPages(buffer[:, 0], buffer[:, 1]), plan.groups[0]
            assert isinstance(group, PagedPlan)
            if kind == "cache write":
                write_kv(pages, key, value, group.slot)
                return [buffer]
            return [paged_attention(query, pages, group, plan.shared, plan.sizes, HEAD_DIM**-0.5)]

        return run

    written = 4 * tokens * KV_HEADS * HEAD_DIM * 2
    read = 2 * setting.rows * context * KV_HEADS * HEAD_DIM * 2 + 2 * tokens * HEADS * HEAD_DIM * 2
    query = tokens // setting.rows
    pairs = setting.rows * (query * (context - query) + query * (query + 1) / 2)
    return [
        Op("cache write", [layer("cache write") for _ in range(count)], written),
        Op("paged attention", [layer("attention") for _ in range(count)], read, 4 * HEADS * HEAD_DIM * pairs),
    ]


def convolution_op(setting: Setting, count: int) -> Op:
    def layer() -> Run:
        tensors = [
            randn(setting.rows + 1, WIDTH - 1, CHANNELS),
            randn(setting.tokens, CHANNELS),
            randn(CHANNELS, WIDTH),
        ]

        def run(device: str, plan: Plan) -> list[torch.Tensor]:
            conv, x, weight = seen_by(device, tensors)
            group = plan.groups[1]
            assert isinstance(group, StatePlan)
            return [causal_conv(x, weight, None, conv, group, plan.shared, silu=True), conv]

        return run

    moved = 2 * (2 * setting.tokens + 2 * setting.rows * (WIDTH - 1)) * CHANNELS
    return Op("convolution", [layer() for _ in range(count)], moved)


def delta_op(setting: Setting, state_dtype: torch.dtype, count: int) -> Op:
    def layer() -> Run:
        tokens = setting.tokens
        tensors = [
            randn(setting.rows + 1, LINEAR_HEADS, LINEAR_DIM, LINEAR_DIM, dtype=state_dtype),
            randn(tokens, CHANNELS),
            randn(tokens, LINEAR_HEADS),
            randn(tokens, LINEAR_HEADS).sigmoid(),
            torch.rand(LINEAR_HEADS, device="cuda"),
            torch.randn(LINEAR_HEADS, device="cuda"),
        ]

        def run(device: str, plan: Plan) -> list[torch.Tensor]:
            recurrent, mixed, a, beta, a_log, dt_bias = seen_by(device, tensors)
            group = plan.groups[1]
            assert isinstance(group, StatePlan)
            parts = [x.unflatten(-1, (LINEAR_HEADS, LINEAR_DIM)) for x in mixed.split(CHANNELS // 3, dim=-1)]
            query, key, value = parts
            decay = Decay(a, a_log, dt_bias)
            out = gated_delta(query, key, value, decay, beta, recurrent, group, plan.shared, plan.sizes)
            return [out, recurrent]

        return run

    state = 2 * setting.rows * LINEAR_HEADS * LINEAR_DIM**2 * state_dtype.itemsize
    moved = state + 4 * setting.tokens * LINEAR_HEADS * LINEAR_DIM * 2
    return Op(f"gated delta, {str(state_dtype)[6:]} state", [layer() for _ in range(count)], moved)


def relative_error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Largest ||got - want|| / ||want|| of an op's results; NaN where any result has one."""
    errors = [float((g.float().cpu() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)]
    return max(errors, key=lambda error: (error != error, error))


def report(op: Op, setting: Setting, bandwidth: float, rate: float, *, in_graph: bool) -> None:
    """rate: floating-point operations per us of a large matrix product."""
    want = op.layers[0]("cpu", setting.cpu)
    error = relative_error(op.layers[0]("cuda", setting.gpu), want)
    del want
    works: list[Callable[[], Any]] = [partial(run, "cuda", setting.gpu) for run in op.layers]
    us = graph_us(works, rounds=max(1, 36 // len(works))) if in_graph else eager_us(works[0])
    floor = max(op.floor_bytes / bandwidth, op.flops / rate)
    print(
        f"  {op.name:32} {us:9.2f} us, floor {floor:9.2f}, {us / max(floor, 1e-9):7.2f}x   error {error:.1e}",
        flush=True,
    )
    if not error < 2e-2:
        raise SystemExit(f"{op.name}: the result is wrong by {error:.2e}")


def eager_us(work: Callable[[], Any]) -> float:
    """GPU time of a call whose launches keep the GPU busy, by events."""
    for _ in range(3):
        work()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        work()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) * 100


def matrix_rate() -> float:
    size = 8192
    a, b = randn(size, size), randn(size, size)
    return 2 * size**3 / graph_us([lambda: a @ b], rounds=4)


def main() -> None:
    require_gpu()
    torch.manual_seed(0)
    print(machine())
    bandwidth, rate = copy_bytes_per_us(), matrix_rate()
    print(f"a large copy moves {bandwidth / 1e6:.2f} TB/s, a large bf16 product runs at {rate / 1e6:.0f} TFLOP/s")
    print(f"fla-core {'is' if fla_gated_delta.is_installed() else 'is not'} installed")
    for rows in (1, 32, 256):
        setting = Setting.of(Phase.DECODE, rows, 1, 511)
        print(f"decode, {rows} rows, context 512; per layer, inside a graph")
        # One after the other: all states of 256 rows together would take tens of GiB.
        for op in attention_op(setting, 512, ATTENTION_LAYERS):
            report(op, setting, bandwidth, rate, in_graph=True)
        report(convolution_op(setting, LINEAR_LAYERS), setting, bandwidth, rate, in_graph=True)
        for dtype in (torch.float32, BF16):
            report(delta_op(setting, dtype, LINEAR_LAYERS), setting, bandwidth, rate, in_graph=True)
    for rows, query, prior in ((1, 2048, 0), (4, 512, 1024)):
        setting = Setting.of(Phase.PREFILL, rows, query, prior)
        print(f"prefill, {rows} x {query} new tokens behind {prior}; per layer, eager")
        ops = [
            *attention_op(setting, query + prior, 1),
            convolution_op(setting, 1),
            delta_op(setting, torch.float32, 1),
        ]
        for op in ops:
            report(op, setting, bandwidth, rate, in_graph=False)
    work = attention_op(Setting.of(Phase.DECODE, 32, 1, 511), 512, 1)[1].layers[0]
    plan = Setting.of(Phase.DECODE, 32, 1, 511).gpu
    print(f"host time of one eager paged attention: {host_us(lambda: work('cuda', plan)):.1f} us")


if __name__ == "__main__":
    main()
