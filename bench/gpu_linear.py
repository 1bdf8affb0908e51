"""Products of few rows on one GPU: weights that share an input in one launch, each in its own, and by the library.

    python bench/gpu_linear.py [--dry] [FILE]

Each time is of a norm that writes x and the products that read it, inside a graph over 24 layers, so that weights come
from memory and kernels start before their predecessors end, as in a decode pass. Shapes are those of
bench/decode_step.py's model. Kernels are compiled by several processes first.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from gpu_timing import Work, copy_bytes_per_us, graph_us, machine
from report import heading, table
from torch.nn.functional import linear

from stepbind.ops import triton_linear, triton_pdl
from stepbind.ops.linear import ARRIVALS
from stepbind.ops.triton_pdl import wait_for_inputs

ROWS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Group:
    """Weights [width, in_features] that share an input."""

    name: str
    in_features: int
    widths: tuple[int, ...]


GROUPS: tuple[Group, ...] = (
    Group("gate, up", 2048, (6144, 6144)),
    Group("query, key, value, gate; beta, decay", 2048, (8192, 32)),
    Group("query; key; value", 2048, (8192, 512, 512)),
    Group("output of DeltaNet", 2048, (2048,)),
    Group("output of attention", 4096, (2048,)),
    Group("down", 6144, (2048,)),
)
Tuning = dict[str, int]
TUNINGS: dict[str, Tuning] = {
    "as it is": {},
    "asked for: none": {"STEPS_ASKED_FOR": 0},
    "1 step": {"STEPS_ASKED_FOR": 1},
    "4 steps": {"STEPS_ASKED_FOR": 4},
    "8 steps": {"STEPS_ASKED_FOR": 8},
    "3 under way": {"STAGES": 3, "STAGES_OF_TWO": 3},
    "6 under way": {"STAGES_OF_TWO": 6},
    "steps of 64": {"STEP": 64, "STAGES": 12, "STAGES_OF_TWO": 8, "STEPS_ASKED_FOR": 4},
}
"""Constants of `triton_linear` that differ. Each but "as it is" is timed at 32 rows."""


@triton.jit  # type: ignore[untyped-decorator]
def _norm(out, x, FEATURES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program i: row i over its root mean square."""
    wait_for_inputs(PDL)
    at = tl.program_id(0) * FEATURES + tl.arange(0, WIDTH)
    inside = tl.arange(0, WIDTH) < FEATURES
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / FEATURES + 1e-6)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


class Layers:
    """Weights of a group for several layers, an input and what a norm makes of it."""

    def __init__(self, group: Group, rows: int, count: int, device: str) -> None:
        shape = {"dtype": torch.bfloat16, "device": device}
        scale = group.in_features**-0.5
        self.weights = [
            tuple(torch.randn(width, group.in_features, **shape).mul_(scale) for width in group.widths)  # type: ignore[call-overload]
            for _ in range(count)
        ]
        self.source = torch.randn(1, rows, group.in_features, **shape)  # type: ignore[call-overload]
        self.x = torch.empty_like(self.source)
        self.arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)

    def norm(self) -> None:
        rows, features = self.x.shape[1:]
        early = triton_pdl.launches_early(self.x.device)
        width = triton.next_power_of_2(features)
        _norm[(rows,)](self.x, self.source, features, width, early, **triton_pdl.launch_options(early))

    def plain(self, layer: int) -> list[torch.Tensor]:
        return [linear(self.x, weight) for weight in self.weights[layer]]

    def apart(self, layer: int) -> list[torch.Tensor]:
        return [
            triton_linear.few_rows_linear(self.x, (weight,), (None,), self.arrived)[0] for weight in self.weights[layer]
        ]

    def joined(self, layer: int) -> list[torch.Tensor]:
        weights = self.weights[layer]
        return list(triton_linear.few_rows_linear(self.x, weights, (None,) * len(weights), self.arrived))

    def us(self, product: Callable[[int], list[torch.Tensor]] | None) -> float:
        """GPU time of a norm and its products."""

        def layer(index: int) -> None:
            self.norm()
            if product is not None:
                product(index)

        works: list[Work] = [partial(layer, index) for index in range(len(self.weights))]
        if self.x.is_cuda:
            return graph_us(works, repeat=8)
        start = time.perf_counter()
        works[0]()
        return (time.perf_counter() - start) * 1e6


@dataclass(frozen=True)
class Job:
    """What has to be compiled."""

    group: Group
    rows: int
    tuning: tuple[tuple[str, int], ...] = ()


def tuned(tuning: Tuning) -> Tuning:
    """Set constants and return what they were."""
    before = {name: vars(triton_linear)[name] for name in tuning}
    for name, value in tuning.items():
        setattr(triton_linear, name, value)
    return before


def compile_job(job: Job) -> None:
    before = tuned(dict(job.tuning))
    layers = Layers(job.group, job.rows, 1, "cuda")
    layers.norm()
    if serves(job.group, job.rows):
        layers.apart(0)
        layers.joined(0)
    torch.cuda.synchronize()
    tuned(before)


def serves(group: Group, rows: int) -> bool:
    return triton_linear.serves_together(rows, group.widths, group.in_features)


def jobs() -> list[Job]:
    found = [Job(group, rows) for rows in (32, 16, 4, 2, 1) for group in GROUPS]  # 8 rows run what 16 run
    return found + [Job(group, 32, tuple(tuning.items())) for tuning in TUNINGS.values() if tuning for group in GROUPS]


def compare(group: Group, rows: int, count: int, device: str, bandwidth: float) -> list[object]:
    """A line of the first table. Raises AssertionError where results differ."""
    layers = Layers(group, rows, count, device)
    layers.norm()
    apart, joined, wanted = layers.apart(0), layers.joined(0), layers.plain(0)
    for one, other, third in zip(apart, joined, wanted, strict=True):
        assert torch.equal(one, other), f"{group.name} at {rows} rows: a shared launch gives other numbers"
        if device == "cuda":  # the interpreter's product of bfloat16 tiles is not one
            torch.testing.assert_close(one, third, atol=0.05, rtol=0.05)
    floor = 2 * sum(group.widths) * group.in_features / bandwidth
    times = [layers.us(product) for product in (None, layers.plain, layers.apart, layers.joined)]
    return [rows, group.name, f"{floor:.1f}", *(f"{each:.1f}" for each in times)]


def tune(group: Group, count: int, device: str) -> list[object]:
    """A line of the second table."""
    layers = Layers(group, 32, count, device)
    cells: list[object] = [group.name]
    for tuning in TUNINGS.values():
        before = tuned(tuning)
        cells.append(f"{layers.us(layers.joined):.1f}" if serves(group, 32) else "")
        tuned(before)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--dry", action="store_true", help="one layer of shorter weights on the CPU, to see that all runs"
    )
    parser.add_argument("file", nargs="?", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    device, count, rows_list = ("cpu", 1, ROWS[-1:]) if arguments.dry else ("cuda", 24, ROWS)
    card, bandwidth = "dry", 4e6
    if not arguments.dry:
        workers = max(1, min(14, (os.cpu_count() or 2) - 2))
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pool.map(compile_job, jobs(), chunksize=1)
        print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
        card, bandwidth = machine(), copy_bytes_per_us()
    groups = GROUPS
    if arguments.dry:
        shorter = [dataclasses.replace(group, in_features=group.in_features // 16) for group in GROUPS]
        groups = tuple(group for group in shorter if serves(group, 32))
    lines = [compare(group, rows, count, device, bandwidth) for group in groups for rows in rows_list]
    tunings = [tune(group, count, device) for group in groups]
    columns = ["rows", "weights", "floor of the weights", "norm alone", "library", "each its own launch", "one launch"]
    report = "\n\n".join(
        [
            heading("Products of few rows"),
            f"{card}. us of a norm and the products of its result; copies run at {bandwidth / 1e6:.2f} TB/s.",
            table(columns, lines),
            "At 32 rows, one launch:",
            table(["weights", *TUNINGS], tunings),
        ]
    )
    print(report)
    print(f"{time.monotonic() - began:.0f} s in all")
    if arguments.file is not None:
        arguments.file.write_text(report + "\n")


if __name__ == "__main__":
    main()
