"""What one bind costs: host time, launches, copies, waits, allocations, and GPU time, eagerly and inside a graph.

    python bench/bind_cost.py

A bind is all that a host does before a forward of a 48-layer hybrid model with 4 cache groups: make the step, fill
the plan, bind it. The floor is one empty Triton launch, measured in the same run. Prints tables, asserts nothing.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import triton
from gpu_timing import Counts, counts, graph_us, host_us_in_turn, machine, require_gpu

from stepbind.bind import bind
from stepbind.caches import Caches
from stepbind.groups import CacheGroup, GroupKind
from stepbind.models.adapt import adapted
from stepbind.plan import Arena, build_plan, make_arena
from stepbind.step import BlockTable, BlockTables, Lengths, Phase, Step, make_step
from stepbind.tiny import tiny_model

FILLS_IN_A_GRAPH = 100
NUM_CHANGING = 2000
"""Different lengths that a host with changing counts hands over in turn: more than the fill keeps sizes of."""


@triton.jit
def empty(x):  # type: ignore[no-untyped-def]
    pass


_nothing = torch.zeros(16, device="cuda" if torch.cuda.is_available() else "cpu")


def launch_empty() -> None:
    empty[(1,)](_nothing)


@dataclass(frozen=True)
class Case:
    phase: Phase = Phase.DECODE
    rows: int = 256
    query: int = 1
    context: int = 512
    groups: int = 4
    layers: int = 48
    device_lengths: bool = True
    changing: bool = False  # other lengths in every step, of which `query` is the longest

    @property
    def name(self) -> str:
        if self.phase is Phase.DECODE:
            lengths = "" if self.device_lengths else ", host lengths"
            return f"decode, {self.rows} rows of {self.context} tokens{lengths}"
        return f"prefill {self.rows} x {self.query}{', other counts every step' if self.changing else ''}"


@dataclass(frozen=True)
class Row:
    """Host times in us; `floor` is an empty launch's at the same moment."""

    floor: float
    step: float
    fill: float
    total: float
    counts: Counts
    graph: float | None


class Host:
    """A host with fixed buffers for one case: the tables that it hands over every step are the same tensors."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.groups = cache_groups(case)
        prior = case.context - 1 if case.phase is Phase.DECODE else 0
        query = [self._lengths([case.query] * case.rows)]
        if case.changing:
            rng = random.Random(0)
            least = case.query // 2
            query = [
                self._lengths([rng.randint(least, case.query) for _ in range(case.rows)]) for _ in range(NUM_CHANGING)
            ]
        self.query, self.prior = itertools.cycle(query), self._lengths([prior] * case.rows)
        columns = -(-(prior + case.query) // 64)
        blocks = torch.arange(1, case.rows * columns + 1, dtype=torch.int32, device="cuda") % 4999 + 1
        self.tables = {group.name: blocks.reshape(case.rows, columns).clone() for group in self.groups}
        self.kept = BlockTables(BlockTable(group, self.tables[group.name]) for group in self.groups)
        self.arena: Arena = make_arena(
            self.groups,
            max_rows=case.rows,
            max_tokens=case.rows * case.query,
            max_context=max(case.context, case.query),
            device="cuda",
        )
        self.caches = Caches()

    def _lengths(self, values: list[int]) -> Lengths:
        host = Lengths.of(values)
        return Lengths(host.host, torch.from_numpy(host.host).cuda()) if self.case.device_lengths else host

    def step(self) -> Step:
        return Step(self.case.phase, next(self.query), self.prior, self.kept)

    def step_with_new_tables(self) -> Step:
        return make_step(self.groups, self.case.phase, next(self.query), self.prior, self.tables)

    def bind(self, model: Any) -> None:
        with bind(build_plan(self.step(), self.arena, strict=False), self.caches, model):
            pass


def cache_groups(case: Case) -> tuple[CacheGroup, ...]:
    """One attention group and state groups, layers dealt out in turn; the last of 4 layers is attention."""
    layers = range(case.layers)
    attention = CacheGroup("attention", GroupKind.ATTENTION, tuple(i for i in layers if i % 4 == 3), 64, 16, 5000)
    linear = [i for i in layers if i % 4 != 3]
    if case.groups == 1:
        return (CacheGroup("attention", GroupKind.ATTENTION, tuple(layers), 64, 16, 5000),)
    state = [
        CacheGroup(f"state{g}", GroupKind.STATE, tuple(linear[g :: case.groups - 1]), 64, 64, 5000)
        for g in range(case.groups - 1)
    ]
    return (attention, *state)


def hybrid_model(layers: int) -> Any:
    types = [*["linear_attention"] * 3, "full_attention"] * (layers // 4)
    return tiny_model("qwen3_5", num_hidden_layers=layers, layer_types=types)


def measure(case: Case, models: dict[int, Any]) -> Row:
    if case.layers not in models:
        models[case.layers] = hybrid_model(case.layers)
    model, host = models[case.layers], Host(case)
    steps = [host.step() for _ in range(NUM_CHANGING if case.changing else 1)]
    random.Random(1).shuffle(steps)  # in another order than `host.bind`, which would leave their sizes behind
    next_step = itertools.cycle(steps)

    def fill() -> None:
        build_plan(next(next_step), host.arena, strict=False)

    with adapted(model):
        works = [launch_empty, host.step, fill, lambda: host.bind(model)]
        floor, step_us, fill_us, total = host_us_in_turn(works, warmup_s=0.15)
        return Row(
            floor=floor,
            step=step_us,
            fill=fill_us,
            total=total,
            counts=counts(lambda: host.bind(model)),
            graph=graph_us([fill], rounds=FILLS_IN_A_GRAPH) if case.device_lengths else None,
        )


def main() -> None:
    require_gpu()
    began = time.perf_counter()
    print(machine())
    models: dict[int, Any] = {}
    for case in (Case(), Case(rows=16, query=512, phase=Phase.PREFILL, device_lengths=False)):
        measure(case, models)  # warms the process up: its first lines were a third slower than later ones
    empty_us = graph_us([launch_empty], rounds=FILLS_IN_A_GRAPH)
    print(f"floor: one empty Triton launch; inside a graph it takes {empty_us:.2f} us of GPU time")
    print(
        "\nhost us: floor | step / fill / whole bind (times the floor) | launches, copies (to host), waits, allocations"
        " | GPU us"
    )
    floors: list[float] = []

    def line(name: str, case: Case) -> None:
        row = measure(case, models)
        floors.append(row.floor)
        print_row(name, row)

    prefill = {"phase": Phase.PREFILL, "device_lengths": False}
    for case in (
        *[Case(rows=rows) for rows in (1, 32, 256)],
        Case(device_lengths=False),
        Case(rows=1, query=8192, **prefill),  # type: ignore[arg-type]
        Case(rows=1, query=8192, changing=True, **prefill),  # type: ignore[arg-type]
        Case(rows=16, query=512, **prefill),  # type: ignore[arg-type]
        Case(rows=16, query=512, changing=True, **prefill),  # type: ignore[arg-type]
    ):
        line(case.name, case)
    print("\ngrowth (256 rows, 4 groups, 48 layers, context 512 where not said otherwise)")
    for name, values in (
        ("rows", [Case(rows=rows) for rows in (1, 16, 64, 256, 1024)]),
        ("groups", [Case(groups=groups) for groups in (1, 2, 4, 8)]),
        ("layers", [Case(layers=layers) for layers in (24, 48, 96)]),
        ("context", [Case(rows=16, context=context) for context in (1024, 8192, 131072, 1048576)]),
    ):
        for case in values:
            line(f"{name} {getattr(case, name)}", case)
    print(f"\nthe floor over all lines: {min(floors):.1f} to {max(floors):.1f} us")
    (new_tables,) = host_us_in_turn([Host(Case()).step_with_new_tables])
    print(f"a step whose tables are looked at again (make_step): {new_tables:.1f} us")
    print(f"measured in {time.perf_counter() - began:.0f} s")


def print_row(name: str, row: Row) -> None:
    did = row.counts
    graph = "-" if row.graph is None else f"{row.graph:.2f} in a graph"
    print(
        f"{name:44} {row.floor:5.1f} | {row.step:6.1f} / {row.fill:5.1f} / {row.total:5.1f} "
        f"({row.total / row.floor:4.2f}x) | {did.launches}, {did.copies} ({did.device_to_host}), {did.syncs}, "
        f"{did.allocations} | {did.gpu_us:.1f}, {graph}",
        flush=True,
    )


if __name__ == "__main__":
    main()
