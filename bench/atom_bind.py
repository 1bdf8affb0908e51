"""What one bind on the ATOM surface costs the host, beside ATOM's own bridge in the same run.

    STEPBIND_ATOM_REFERENCE=.../atom/plugin/rtpllm/utils/forward_context.py python bench/atom_bind.py [FILE]
    ... python bench/atom_bind.py --device cuda [FILE]

The environment variable says where ATOM's own bridge lies; it is no part of this project, and without it only our own
times are printed. Both run under the double of ATOM that the tests use: 48 layers, 4 cache groups for the hybrid, one
for the other models. A bind is all that both do between the host's inputs and the layers: build, set as the ambient
context, and restore; "with states" adds what ATOM's Gated DeltaNet layers ask for, each its state slots. On a GPU a
second table has ours alone, in turn with one empty Triton launch, a third passes of which none is like an earlier one,
and a fourth what the GPU was asked for. Prints the tables, and writes them to FILE.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_timing import counts, host_us_in_turn, machine, require_gpu
from report import heading, table

from stepbind.targets import atom

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the double
modules: Any = importlib.import_module("tests.targets.atom_double.modules")
passes: Any = importlib.import_module("tests.targets.atom_double.passes")

LAYERS = 48
BLOCK_SIZE, NUM_BLOCKS = 64, 4096
REPEATS = 400
PASSES = 4
NEW_PASSES = 600
"""More than anything here remembers kinds or sizes of."""
HYBRID, PLAIN, LATENT = "RTPForwardQwen35HybridContext", "RTPForwardContext", "RTPForwardMLAContext"


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    query: int
    prior: int
    new: str = ""
    """What is new in every pass: "tables", which then lie elsewhere, or "counts" of up to `query` new tokens."""

    @property
    def prefill(self) -> bool:
        return self.query > 1

    def __str__(self) -> str:
        kind = {HYBRID: "hybrid", PLAIN: "plain", LATENT: "sparse MLA"}[self.name]
        what = f"prefill {self.rows} x {self.query}" if self.prefill else f"decode, {self.rows} rows"
        return f"{kind}, {what}" + (f", other {self.new}" if self.new else "")


CASES = [
    *(Case(HYBRID, rows, 1, 511) for rows in (1, 32, 256)),
    Case(HYBRID, 1, 8192, 64),
    Case(HYBRID, 16, 512, 64),
    *(Case(name, *sizes) for name in (PLAIN, LATENT) for sizes in ((256, 1, 511), (16, 512, 64))),
]
NEW_CASES = [
    Case(HYBRID, 32, 1, 511, "tables"),
    Case(HYBRID, 16, 512, 64, "tables"),
    Case(HYBRID, 16, 512, 64, "counts"),
    Case(LATENT, 16, 512, 64, "counts"),
]
MODELS: dict[str, Callable[[int], Any]] = {
    HYBRID: passes.hybrid_model,
    PLAIN: passes.plain_model,
    LATENT: passes.latent_model,
}


class Bench:
    """One case, ready to be bound by either bridge's class."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.model = MODELS[case.name](LAYERS)
        self.kv_cache = passes.runtime_for(self.model, BLOCK_SIZE, BLOCK_SIZE, NUM_BLOCKS, device).kv_cache
        self.tables = [self._tables(number) for number in range(NEW_PASSES if case.new == "tables" else PASSES)]
        self.passes = [self._pass(number) for number in range(NEW_PASSES if case.new else PASSES)]

    def _tables(self, number: int) -> list[torch.Tensor]:
        """Of each group, and the store's of the first one."""
        case, groups = self.case, 4 if self.case.name == HYBRID else 1
        columns = -(-(case.prior + PASSES + case.query) // BLOCK_SIZE)
        generator = torch.Generator().manual_seed(number)
        shape = (groups, case.rows, columns)
        blocks = torch.randint(1, NUM_BLOCKS, shape, generator=generator, dtype=torch.int32).to(self.device)
        return [each.clone() for each in (*blocks, blocks[0])]

    def _pass(self, number: int) -> tuple[Any, torch.Tensor]:
        """Inputs and positions; each pass has a token more in the cache than the one before, every few ones."""
        case = self.case
        query, prior = [case.query] * case.rows, [case.prior + number % PASSES] * case.rows
        if case.new == "counts":
            query = [random.Random(number).randint(1, case.query) for _ in query]
        *tables, store = self.tables[number % len(self.tables)]
        inputs = passes.pass_inputs(
            prefill=case.prefill,
            query=query,
            prior=prior,
            tables=tables,
            store=store,
            layer_to_group=[0 if layer % 4 == 3 else 1 + layer % 4 for layer in range(LAYERS)],
        )
        return passes.on_device(inputs, self.device), passes.positions_of(query, prior).to(self.device)

    def calls(self, bridge: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        """A bind, and a bind with every layer's state slots."""
        context = getattr(bridge, self.case.name)
        runtime = SimpleNamespace(kv_cache=self.kv_cache)
        maps = context.collect_layer_maps(self.model)
        turns, device = itertools.cycle(self.passes), torch.device(self.device)

        def next_bind() -> Any:
            inputs, positions = next(turns)
            return context.bind(model=self.model, runtime=runtime, inputs=inputs, positions=positions, layer_maps=maps)

        def bind() -> None:
            with next_bind():
                pass

        def with_states() -> None:
            with next_bind():
                metadata = importlib.import_module("atom.utils.forward_context").get_forward_context().attn_metadata
                gdn = metadata.gdn_metadata
                for layer in maps[0]:
                    context.state_indices_for_layer(
                        attn_inputs=gdn.rtp_attn_inputs,
                        is_prefill=self.case.prefill,
                        device=device,
                        seq_size_per_block=gdn.rtp_seq_size_per_block,
                        layer_num=layer,
                        state_indices_cache=gdn.rtp_state_indices_cache,
                        layer_group_map=gdn.rtp_layer_group_map,
                    )

        return bind, with_states


def medians(calls: list[Callable[[], None]], device: str) -> list[float]:
    """Median host time of each in microseconds, taken in turns, so that the machine's moods hit all alike. A GPU is
    idle before each."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(REPEATS + 10):
        for call, of_call in zip(calls, times, strict=True):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if turn >= 10:
                of_call.append(time.perf_counter() - start)
    return [1e6 * statistics.median(of_call) for of_call in times]


def row(case: Case, reference: Any | None, device: str) -> list[object]:
    bench = Bench(case, device)
    calls = [bench.calls(bridge) for bridge in (atom, reference) if bridge is not None]
    cells: list[object] = [case]
    for bind_or_states in range(2):
        if bind_or_states and case.name != HYBRID:
            return [*cells, *[""] * (3 if reference else 1)]
        us = medians([pair[bind_or_states] for pair in calls], device)
        cells += [f"{each:.0f}" for each in us]
        if reference:
            cells.append(f"{us[1] / us[0]:.1f}")
    return cells


def counts_row(case: Case, reference: Any | None) -> list[object]:
    """What one bind (a hybrid's with its states) does on a GPU."""
    bench = Bench(case, "cuda")
    cells: list[object] = [case]
    for bridge in (atom, reference):
        if bridge is not None:
            call = bench.calls(bridge)[1 if case.name == HYBRID else 0]
            for _ in range(2 * PASSES):
                call()
            did = counts(call)
            cells += [did.launches, did.copies, did.device_to_host, did.syncs, did.allocations, f"{did.gpu_us:.0f}"]
    return cells


def floors_row(case: Case) -> list[object]:
    """Ours alone, in turn with one empty Triton launch."""
    from bind_cost import launch_empty

    bench = Bench(case, "cuda")
    floor, *us = host_us_in_turn([launch_empty, *bench.calls(atom)])
    cells: list[object] = [case, f"{floor:.1f}"]
    for each in us if case.name == HYBRID else us[:1]:
        cells += [f"{each:.0f}", f"{each / floor:.1f}"]
    return [*cells, *[""] * (6 - len(cells))]


def tables(reference: Any | None, device: str) -> str:
    both = reference is not None
    columns = ["case", "bind, us", "with states, us"]
    if both:
        columns = ["case", "bind, us", "reference, us", "ratio", "with states, us", "reference, us", "ratio"]
    text = table(columns, [row(case, reference, device) for case in CASES])
    if device == "cpu":
        return text
    columns = ["case", "floor, us", "bind alone, us", "floors", "with states, us", "floors"]
    for cases in (CASES, NEW_CASES):
        text += f"\n\n{table(columns, [floors_row(case) for case in cases])}"
    columns = ["launches", "copies", "to the host", "waits", "allocations", "GPU us"]
    columns = ["case", *columns, *[f"reference: {name}" for name in columns if both]]
    return f"{text}\n\n{table(columns, [counts_row(case, reference) for case in CASES])}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("file", nargs="?", type=Path)
    arguments = parser.parse_args()
    device: str = arguments.device
    if device == "cuda":
        require_gpu()
    torch.set_num_threads(1)
    with modules.atom_installed():
        reference = modules.reference_module()
        before: Any = vars(torch.cuda).get("is_current_stream_capturing")
        if reference is not None and device == "cpu":
            torch.cuda.is_current_stream_capturing = lambda: False  # a CPU build has none
        try:
            found = tables(reference, device)
        finally:
            torch.cuda.is_current_stream_capturing = before
    where = "CPU tensors" if device == "cpu" else f"on a GPU\n\n{machine()}"
    text = f"{heading(f'Bind on the ATOM surface, {where}')}\n\n{found}\n"
    print(text)
    if arguments.file is not None:
        arguments.file.write_text(text)


if __name__ == "__main__":
    main()
