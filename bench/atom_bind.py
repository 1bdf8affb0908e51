"""What one bind on the ATOM surface costs the host, beside ATOM's own bridge in the same run, on CPU tensors.

    STEPBIND_ATOM_REFERENCE=.../atom/plugin/rtpllm/utils/forward_context.py python bench/atom_bind.py [FILE]

The environment variable says where ATOM's own bridge lies; it is no part of this project, and without it only our own
times are printed. Both run under the double of ATOM that the tests use: 48 layers, 4 cache groups for the hybrid, one
for the other models. A bind is all that both do between the host's inputs and the layers: build, set as the ambient
context, and restore; "with states" adds what ATOM's Gated DeltaNet layers ask for, each its state slots. Prints a
table, and writes it to FILE.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from report import heading, table

from stepbind.targets import atom

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the double
modules: Any = importlib.import_module("tests.targets.atom_double.modules")
passes: Any = importlib.import_module("tests.targets.atom_double.passes")

LAYERS = 48
BLOCK_SIZE, NUM_BLOCKS = 64, 4096
REPEATS = 150
PASSES = 4
HYBRID, PLAIN, LATENT = "RTPForwardQwen35HybridContext", "RTPForwardContext", "RTPForwardMLAContext"


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    query: int
    prior: int

    @property
    def prefill(self) -> bool:
        return self.query > 1

    def __str__(self) -> str:
        kind = {HYBRID: "hybrid", PLAIN: "plain", LATENT: "sparse MLA"}[self.name]
        what = f"prefill {self.rows} x {self.query}" if self.prefill else f"decode, {self.rows} rows"
        return f"{kind}, {what}"


CASES = [
    *(Case(HYBRID, rows, 1, 511) for rows in (1, 32, 256)),
    Case(HYBRID, 1, 8192, 64),
    Case(HYBRID, 16, 512, 64),
    *(Case(name, *sizes) for name in (PLAIN, LATENT) for sizes in ((256, 1, 511), (16, 512, 64))),
]
MODELS: dict[str, Callable[[int], Any]] = {
    HYBRID: passes.hybrid_model,
    PLAIN: passes.plain_model,
    LATENT: passes.latent_model,
}


class Bench:
    """One case, ready to be bound by either bridge's class."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = MODELS[case.name](LAYERS)
        self.kv_cache = passes.runtime_for(self.model, BLOCK_SIZE, BLOCK_SIZE, NUM_BLOCKS).kv_cache
        self.passes = [self._pass(number) for number in range(PASSES)]

    def _pass(self, number: int) -> tuple[Any, torch.Tensor]:
        """Inputs and positions; each pass has `number` tokens more in the cache."""
        case = self.case
        groups = 4 if case.name == HYBRID else 1
        query, prior = [case.query] * case.rows, [case.prior + number] * case.rows
        columns = -(-(case.prior + PASSES + case.query) // BLOCK_SIZE)
        generator = torch.Generator().manual_seed(number)
        shape = (groups, case.rows, columns)
        blocks = torch.randint(1, NUM_BLOCKS, shape, generator=generator, dtype=torch.int32)
        inputs = passes.pass_inputs(
            prefill=case.prefill,
            query=query,
            prior=prior,
            tables=[each.clone() for each in blocks],
            store=blocks[0].clone(),
            layer_to_group=[0 if layer % 4 == 3 else 1 + layer % 4 for layer in range(LAYERS)],
        )
        return inputs, passes.positions_of(query, prior)

    def calls(self, bridge: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        """A bind, and a bind with every layer's state slots."""
        context = getattr(bridge, self.case.name)
        runtime = SimpleNamespace(kv_cache=self.kv_cache)
        maps = context.collect_layer_maps(self.model)
        turns = itertools.cycle(self.passes)

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
                        device=torch.device("cpu"),
                        seq_size_per_block=gdn.rtp_seq_size_per_block,
                        layer_num=layer,
                        state_indices_cache=gdn.rtp_state_indices_cache,
                        layer_group_map=gdn.rtp_layer_group_map,
                    )

        return bind, with_states


def medians(calls: list[Callable[[], None]]) -> list[float]:
    """Median time of each in microseconds, taken in turns, so that the machine's moods hit all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(REPEATS + 10):
        for call, of_call in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if turn >= 10:
                of_call.append(time.perf_counter() - start)
    return [1e6 * statistics.median(of_call) for of_call in times]


def row(case: Case, reference: Any | None) -> list[object]:
    bench = Bench(case)
    ours = bench.calls(atom)
    if reference is None:
        return [case, *(f"{us:.0f}" for us in medians(list(ours)))]
    cells: list[object] = [case]
    theirs = bench.calls(reference)
    for mine, other in zip(ours, theirs, strict=True):
        if case.name != HYBRID and mine is ours[1]:
            return [*cells, "", "", ""]
        us, reference_us = medians([mine, other])
        cells += [f"{us:.0f}", f"{reference_us:.0f}", f"{reference_us / us:.1f}"]
    return cells


def main() -> None:
    torch.set_num_threads(1)
    with modules.atom_installed():
        reference = modules.reference_module()
        before: Any = vars(torch.cuda).get("is_current_stream_capturing")
        if reference is not None:
            torch.cuda.is_current_stream_capturing = lambda: False  # a CPU build has none
        try:
            rows = [row(case, reference) for case in CASES]
        finally:
            torch.cuda.is_current_stream_capturing = before
    columns = ["case", "bind, us", "with states, us"]
    if reference is not None:
        columns = ["case", "bind, us", "reference, us", "ratio", "with states, us", "reference, us", "ratio"]
    text = f"{heading('Bind on the ATOM surface, CPU tensors')}\n\n{table(columns, rows)}\n"
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
