"""Decode by graphs: launching passes, and landing their tokens one pass later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stepbind.caches import Caches
from stepbind.hosts.local.graphs import DecodeGraphs, Graph
from stepbind.hosts.local.rows import DecodeRows
from stepbind.hosts.local.scheduler import Batch
from stepbind.plan import Arena, check_faults


@dataclass(frozen=True, eq=False)
class Flight:
    """A launched pass. `result` is the graph's, on the host once `landed` says so (None: it is there already)."""

    batch: Batch
    graph: Graph
    result: torch.Tensor
    landed: torch.cuda.Event | None


class GraphDecoder:
    """Runs decode batches by graphs. A pass can be launched before the tokens of the one before it are read."""

    def __init__(
        self, model: Any, arena: Arena, caches: Caches, graph_rows: tuple[int, ...], *, compile_layers: bool
    ) -> None:
        self._arena = arena
        self._rows = DecodeRows(
            arena.cache_groups, max_rows=arena.max_rows, max_context=arena.max_context, device=arena.device
        )
        self._graphs = DecodeGraphs(model, arena, caches, self._rows, graph_rows, compile_layers=compile_layers)
        self._on_gpu = arena.device.type == "cuda"
        words = arena.max_rows + arena.faults.numel()
        # Two in turn: one is read while the other is written.
        self._results = [torch.zeros(words, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(2)]
        self._turn = 0

    def launch(self, batch: Batch) -> Flight:
        """Launch a pass whose rows' last tokens are known."""
        if self._graphs.stale:
            self._graphs.capture()
        self._rows.set(batch.sequences)
        return self._replay(batch)

    def go_on(self, batch: Batch) -> Flight:
        """Launch one more pass of the same rows; their tokens are where the pass before it leaves them."""
        self._rows.go_on()
        return self._replay(batch)

    def land(self, flight: Flight) -> tuple[list[int], torch.Tensor]:
        """Wait for a pass: each row's best token, and the logits [rows, vocabulary] in the model's dtype, which hold
        until the next launch. Raises `BlockFaultError` for faults that the plan counted."""
        if flight.landed is not None:
            flight.landed.synchronize()
        count, values = len(flight.batch.sequences), flight.result.tolist()
        if any(values[flight.graph.rows :: 2]):  # (count, lowest row) of each group
            check_faults(self._arena)
        return values[:count], flight.graph.logits[:count]

    @property
    def largest_graph(self) -> Graph:
        """For measuring: the graph of all rows."""
        return self._graphs.for_rows(self._arena.max_rows)

    def rewind(self) -> None:
        """For measuring: undo a replay's advance, so that the next one stands at the same context."""
        self._rows.prior_len -= self._rows.query_len

    def _replay(self, batch: Batch) -> Flight:
        graph = self._graphs.for_rows(len(batch.sequences))
        graph.replay()
        result = self._results[self._turn][: graph.result.shape[0]]
        self._turn = 1 - self._turn
        result.copy_(graph.result, non_blocking=True)
        landed = None
        if self._on_gpu:
            landed = torch.cuda.Event()
            landed.record()
        return Flight(batch, graph, result, landed)
