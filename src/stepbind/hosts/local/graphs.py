"""Decode passes captured on fixed buffers, one graph for each padded batch size, replayed on refreshed values.

A replay reads what the host refreshes (`DecodeRows`) and nothing else that changes: the plan is filled inside the
graph, by the same code as everywhere. A row is padding when its lengths are 0. The graph ends by choosing each row's
best token and making it that row's next input, so that a greedy batch goes on before the host has seen its tokens.

On the CPU there is nothing to capture with; the same pass, with the host scalars of its "capture", is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo

from stepbind.bind import bind
from stepbind.caches import Caches
from stepbind.hosts.local.rows import DecodeRows
from stepbind.models.experts import capturable_experts, has_experts
from stepbind.ops.join_linear import JOIN_LINEAR
from stepbind.ops.linear import ARRIVALS, few_rows_linears, serves_model
from stepbind.plan import Arena, build_plan
from stepbind.step import Lengths, Phase, Step, make_step

EARLY_LAYERS = True
"""Whether the kernels that torch.compile makes start before their predecessor has ended, as `ops.triton_pdl` has it.
torch does so on NVIDIA GPUs since Hopper alone. Never with experts: a kernel of torch's that reads nothing does not
wait, and routers have such kernels (zeros to scatter into), so that a third one could start too early."""
JOINED_PRODUCTS = True
"""Whether products of one input that torch.compile finds in a layer share a launch: the same numbers (tests/gpu), and
6 to 7% less time a step on an H200 (bench/results)."""
WARMUPS = 2
"""Passes before a capture: kernels are compiled and libraries set up in them, which a capture cannot."""


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured decode pass of `rows` padded rows. `result` [rows + 2 * groups] int32: each row's best token, and
    behind them the arena's faults; logits [rows, vocabulary] in the model's dtype."""

    rows: int
    replay: Callable[[], None]
    logits: torch.Tensor
    result: torch.Tensor


class DecodeGraphs:
    """The graphs of one model on one arena and its caches, by padded rows."""

    def __init__(
        self,
        model: Any,
        arena: Arena,
        caches: Caches,
        rows: DecodeRows,
        sizes: tuple[int, ...],
        *,
        compile_layers: bool,
    ) -> None:
        self._model, self._arena, self._caches, self._rows = model, arena, caches, rows
        self._sizes = tuple(sorted({size for size in sizes if size < arena.max_rows} | {arena.max_rows}))
        self._compile_layers = compile_layers
        self._graphs: dict[int, Graph] = {}
        self._generation = caches.generation
        self._pool: Any = None
        self._arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device=arena.device)

    @property
    def stale(self) -> bool:
        """Whether there are no graphs, or none that hold: a view that they baked in was replaced."""
        return not self._graphs or self._generation != self._caches.generation

    def capture(self) -> None:
        """Capture every size, with no live row. The rows have to be set again afterwards."""
        self._rows.set([])
        graphs, self._graphs = {}, {}  # a capture that fails leaves none behind
        generation = self._caches.generation
        for size in reversed(self._sizes):
            with few_rows_linears(self._model, size, self._arrived):
                graphs[size] = self._capture(size)
        self._graphs, self._generation = graphs, generation

    def for_rows(self, count: int) -> Graph:
        """The smallest captured graph that has `count` rows."""
        return self._graphs[next(size for size in self._sizes if size >= count)]

    def _capture(self, size: int) -> Graph:
        step = self._step(size)
        if self._arena.device.type != "cuda":
            logits, result = self._forward(step)

            def run_again() -> None:
                new_logits, new_result = self._forward(step)
                logits.copy_(new_logits)
                result.copy_(new_result)

            return Graph(size, run_again, logits, result)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                self._forward(step)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, result = self._forward(step)
        self._pool = self._pool or graph.pool()
        return Graph(size, graph.replay, logits, result)

    def _step(self, size: int) -> Step:
        """Lengths and tables where the rows keep them; the host's lengths are bounds."""
        rows, context = self._rows, self._arena.max_context
        return make_step(
            self._arena.cache_groups,
            Phase.DECODE,
            Lengths(Lengths.of([1] * size).host, rows.query_len[:size]),
            Lengths(Lengths.of([context - 1] * size).host, rows.prior_len[:size]),
            {group.name: table[:size] for group, table in zip(rows.groups, rows.tables, strict=True)},
            lengths_are_bounds=True,
        )

    def _forward(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """What is captured: fill, forward, choice, and the rows' advance."""
        rows, size = self._rows, step.num_rows
        plan = build_plan(step, self._arena)
        with bind(plan, self._caches, self._model), capturable_experts(self._model), self._layers_compiled(size):
            out = self._model(
                input_ids=rows.token[:size][None].long(), position_ids=plan.shared.position[None], use_cache=False
            )
        logits = out.logits[0]
        best = logits.argmax(dim=-1).int()
        rows.token[:size] = best
        rows.prior_len[:size] += rows.query_len[:size]
        return logits, torch.cat([best, self._arena.faults.flatten()])

    @contextmanager
    def _layers_compiled(self, rows: int) -> Iterator[None]:
        """Decoder layers through torch.compile inside the block, if asked for: it fuses norms, gates and residuals;
        the ops stay as they are. Each size compiles once, at its warm-up."""
        if not self._compile_layers:
            yield
            return
        layers, options = self._model.get_decoder().layers, inductor_options(self._model, rows)
        with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=4096):
            for layer in layers:
                layer.compile(dynamic=False, options=options)
            try:
                yield
            finally:
                for layer in layers:
                    layer._compiled_call_impl = None  # what `compile` sets; there is no call that undoes it


def inductor_options(model: Any, rows: int) -> dict[str, Any]:
    """How torch.compile treats the layers of a graph of so many rows. Where products are ours, those of one input
    share a launch; where they are not, those of one row become tuned reductions that norms and gates fuse into (9% of
    a step on an H200, bench/results)."""
    options: dict[str, Any] = {"triton.enable_pdl": True} if EARLY_LAYERS and not has_experts(model) else {}
    ours = serves_model(model, rows)
    if ours and JOINED_PRODUCTS:
        options["post_grad_custom_pre_pass"] = JOIN_LINEAR
    if rows == 1 and not ours:
        options["coordinate_descent_tuning"] = True
    return options
