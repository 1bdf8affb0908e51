"""RTP's graph runner, emulated on the CPU.

A captured pass is the model's forward on the capture's own tensors. Its replay runs that forward again on the same
device tensors, of which exactly what RTP refreshes was refreshed, and on the host values of the capture: whatever the
forward takes from those is baked in, as in a graph. All that RTP does not refresh is poison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from stepbind.groups import GroupKind
from stepbind.step import Phase
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
            torch.zeros(most, columns * (1 if group.kind is GroupKind.STATE else group.ratio), dtype=torch.int32)
            for group, columns in zip(layout.groups, self.columns, strict=True)
        ]
        self.stores = [torch.full((most, columns), POISON, dtype=torch.int32) for columns in self.columns]
        self.input_ids = torch.zeros(most * query, dtype=torch.int32)
        self.positions = torch.full((most * query,), POISON, dtype=torch.int32)
        # Everything is as large as the largest batch; a capture of fewer rows sees the front of it.
        self.lengths = attention_inputs(self.phase, [Row([0] * query, 0, [])] * most)
        for name in REFRESHED:
            getattr(self.lengths, name).zero_()
        self.captured = {size: self._capture(size) for size in reversed(self.sizes)}

    def replay(self, rows: Sequence[Row]) -> torch.Tensor:
        """Hidden states of the live rows' tokens."""
        live = len(rows)
        size = next(size for size in self.sizes if size >= live)
        self.input_ids[: live * self.query] = torch.tensor([t for row in rows for t in row.tokens], dtype=torch.int32)
        fresh = attention_inputs(self.phase, rows)
        for name in REFRESHED:
            value = getattr(fresh, name)
            getattr(self.lengths, name)[: value.shape[0]] = value
        for index, group in enumerate(self.layout.groups):
            self.tables[index].zero_()
            of_group = [row.tables[index] for row in rows]
            self.tables[index][:live] = kernel_table(group, of_group, self.columns[index])
        captured = self.captured[size]
        newer = self.layout.generation == "newer"
        captured.handle.prepare_cuda_graph({group.name: fresh for group in self.layout.groups} if newer else fresh)
        out = self.model.forward(captured.inputs, captured.handle).hidden_states
        return out[: live * self.query]

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
        self.model.forward(inputs, handle)  # warm-up, on zero lengths and tables
        self.model.forward(inputs, handle)
        return _Captured(inputs, handle)
