"""RTP's graph runner, on a GPU and emulated on the CPU.

A captured pass is the model's forward on the capture's own tensors. Its replay launches the graph. On the CPU it runs
that forward again on the same device tensors, of which exactly what RTP refreshes was refreshed, and on the host values
of the capture: whatever the forward takes from those is baked in, as in a graph. All that RTP does not refresh is
poison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from stepbind.groups import GroupKind
from stepbind.step import Phase
from tests.hosts.rtp_double.cuda_graph import CudaGraph
from tests.hosts.rtp_double.inputs import Layout, ModelInputs, Row, attention_inputs, kernel_table, with_tables

POISON = 1_000_003
REFRESHED = (
    "cu_seqlens_device",
    "input_lengths_device",
    "prefix_lengths_device",
    "sequence_lengths_plus_1_device",
    "decode_cu_seqlens_device",
)


@dataclass
class _Captured:
    inputs: ModelInputs
    replay: Callable[[], tuple[torch.Tensor, ...]]
    handle: Any


class GraphRunner:
    """Decode graphs (one token a row) or verify graphs (`query` tokens a row), one for each batch size."""

    def __init__(self, model: Any, layout: Layout, sizes: Sequence[int], max_context: int, query: int = 1) -> None:
        self.model, self.layout, self.query = model, layout, query
        self.phase = Phase.DECODE if query == 1 else Phase.VERIFY
        self.sizes = sorted(sizes)
        most = self.sizes[-1]
        self.columns = [-(-max_context // group.block_size) + query for group in layout.groups]
        self.tables = [
            self._buffer(most, columns * (1 if group.kind is GroupKind.STATE else group.ratio))
            for group, columns in zip(layout.groups, self.columns, strict=True)
        ]
        self.stores = [self._buffer(most, columns).fill_(POISON) for columns in self.columns]
        self.input_ids = self._buffer(most * query)
        self.positions = self._buffer(most * query).fill_(POISON)
        # Everything is as large as the largest batch; a capture of fewer rows sees the front of it.
        self.lengths = attention_inputs(self.phase, [Row([0] * query, 0, [])] * most)
        for name in REFRESHED:
            setattr(self.lengths, name, self._buffer(getattr(self.lengths, name).shape[0]))
        self.captured = {size: self._capture(size) for size in reversed(self.sizes)}

    def replay(self, rows: Sequence[Row]) -> torch.Tensor:
        """Hidden states of the live rows' tokens."""
        live = len(rows)
        size = next(size for size in self.sizes if size >= live)
        ids = torch.tensor([t for row in rows for t in row.tokens], dtype=torch.int32)
        self.input_ids[: live * self.query].copy_(ids)
        fresh = attention_inputs(self.phase, rows)
        for name in REFRESHED:
            value = getattr(fresh, name)
            getattr(self.lengths, name)[: value.shape[0]].copy_(value)
        for index, group in enumerate(self.layout.groups):
            self.tables[index].zero_()
            of_group = [row.tables[index] for row in rows]
            self.tables[index][:live].copy_(kernel_table(group, of_group, self.columns[index]))
        captured = self.captured[size]
        newer = self.layout.generation == "newer"
        captured.handle.prepare_cuda_graph({group.name: fresh for group in self.layout.groups} if newer else fresh)
        return captured.replay()[0][: live * self.query]

    def _buffer(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.layout.device)

    def _capture(self, size: int) -> _Captured:
        base = SimpleNamespace(**vars(self.lengths))
        base.is_cuda_graph = True
        for name in REFRESHED:
            tensor = getattr(self.lengths, name)
            setattr(base, name, tensor[: size + 1] if "cu_seqlens" in name else tensor[:size])
        for name in ("input_lengths", "prefix_lengths", "sequence_lengths"):  # host values of the capture
            setattr(base, name, torch.full_like(getattr(self.lengths, name)[:size], POISON))
        base.combo_position_ids = self.positions[: size * self.query]
        tables = [(table[:size], store[:size]) for table, store in zip(self.tables, self.stores, strict=True)]
        inputs = ModelInputs(self.input_ids[: size * self.query], with_tables(self.layout, base, tables))
        handle = self.model.prepare_fmha_impl(inputs, True)

        def run() -> tuple[torch.Tensor, ...]:
            return (self.model.forward(inputs, handle).hidden_states,)

        if self.layout.device != "cpu":
            return _Captured(inputs, CudaGraph(run).replay, handle)
        for _ in range(2):
            run()  # warm-up, on zero lengths and tables
        return _Captured(inputs, run, handle)
