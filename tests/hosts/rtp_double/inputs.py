"""RTP's inputs of a pass, in both generations, from rows of tokens and physical block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from stepbind.groups import CacheGroup, GroupKind
from stepbind.step import Phase

GENERATIONS = ("older", "newer")


@dataclass
class ModelInputs:
    """`PyModelInputs`."""

    input_ids: torch.Tensor | None
    attention_inputs: Any
    input_hiddens: torch.Tensor | None = None
    bert_embedding_inputs: Any = None


@dataclass
class ModelOutputs:
    """`PyModelOutputs`."""

    hidden_states: torch.Tensor


@dataclass
class InitResources:
    """`PyModelInitResources`."""

    kv_cache: Any


@dataclass
class Row:
    """A request in a pass: its new tokens, how many are in the cache, and its physical blocks in each group."""

    tokens: list[int]
    prior: int
    tables: list[list[int]]


@dataclass
class Layout:
    """The host's groups, and the generation of its interface. In the newer one a group's name is its tag."""

    groups: tuple[CacheGroup, ...]
    generation: str
    layers: int
    verify_tables: bool = False
    columns: dict[str, int] = field(default_factory=dict)  # physical columns; by the longest row where not given
    device: str = "cpu"


def int32(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def kernel_table(group: CacheGroup, tables: Sequence[Sequence[int]], columns: int) -> torch.Tensor:
    """[B, columns * ratio]: attention groups are expanded to kernel blocks, recurrent ones are not. Past a row's own
    blocks stands 0, as in RTP's zeroed buffers; -1 marks blocks that are not materialised."""
    ratio = 1 if group.kind is GroupKind.STATE else group.ratio
    rows = []
    for table in tables:
        padded = list(table) + [0] * (columns - len(table))
        rows.append([b if b <= 0 else b * ratio + i for b in padded for i in range(ratio)])
    return int32(rows)


def physical_table(tables: Sequence[Sequence[int]], columns: int) -> torch.Tensor:
    return int32([list(table) + [0] * (columns - len(table)) for table in tables])


def attention_inputs(phase: Phase, rows: Sequence[Row]) -> SimpleNamespace:
    """Lengths alone, host and device; tables are set by `with_tables`."""
    query, prior = int32([len(row.tokens) for row in rows]), int32([row.prior for row in rows])
    none = torch.empty(0, dtype=torch.int32)
    decode = phase is Phase.DECODE
    start = torch.zeros(len(rows) + 1, dtype=torch.int32)
    if not decode:
        start[1:] = query.cumsum(0)
    # In decode input_lengths may be the prompt's length: only how many there are can be trusted.
    lengths = torch.full_like(query, 4321) if decode else query
    return SimpleNamespace(
        is_prefill=not decode,
        is_target_verify=phase is Phase.VERIFY,
        is_cuda_graph=False,
        input_lengths=lengths,
        input_lengths_device=lengths.clone(),
        prefix_lengths=none if decode else prior,
        prefix_lengths_device=none if decode else prior.clone(),
        sequence_lengths=prior if decode else none,
        sequence_lengths_plus_1_device=none if phase is Phase.PREFILL else prior + 1,
        cu_seqlens=start,
        cu_seqlens_device=start.clone(),
        decode_cu_seqlens_device=torch.arange(len(rows) + 1, dtype=torch.int32),
        combo_position_ids=none,
        total_tokens=int(query.sum()),
        context_total_kv_length=int((query + prior).sum()),
    )


def with_tables(layout: Layout, base: SimpleNamespace, tables: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """`attention_inputs` with (kernel, physical) tables of each group, in the layout's generation."""
    each = []
    for kernel, physical in tables:
        inputs = SimpleNamespace(**vars(base))
        inputs.kv_cache_kernel_block_id_device, inputs.kv_cache_block_id_device = kernel, physical
        inputs.kv_cache_kernel_block_id, inputs.kv_cache_block_id = kernel.clone(), physical.clone()
        each.append(inputs)
    if layout.generation == "newer":
        return {group.name: inputs for group, inputs in zip(layout.groups, each, strict=True)}
    if len(each) > 1:
        numbers = {layer: number for number, group in enumerate(layout.groups) for layer in group.layers}
        each[0].kv_cache_kernel_block_id_device_by_group = [kernel for kernel, _ in tables]
        each[0].kv_cache_layer_to_group = int32([numbers[layer] for layer in range(layout.layers)])
    return each[0]


def model_inputs(layout: Layout, phase: Phase, rows: Sequence[Row]) -> ModelInputs:
    """An eager pass."""
    tables = []
    for index, group in enumerate(layout.groups):
        of_group = [row.tables[index] for row in rows]
        columns = layout.columns.get(group.name) or max(len(table) for table in of_group)
        tables.append((kernel_table(group, of_group, columns), physical_table(of_group, columns)))
    ids = int32([token for row in rows for token in row.tokens])
    inputs = ModelInputs(ids, with_tables(layout, attention_inputs(phase, rows), tables))
    return inputs if layout.device == "cpu" else on_device(inputs, layout.device)


def on_device(inputs: ModelInputs, device: str) -> ModelInputs:
    """The same with what RTP has on the device there, and the host's mirrors pinned."""
    found = inputs.attention_inputs
    for attention in found.values() if isinstance(found, dict) else [found]:
        for name, value in vars(attention).items():
            if name.endswith("_by_group"):
                setattr(attention, name, [table.to(device) for table in value])
            elif isinstance(value, torch.Tensor) and name != "kv_cache_layer_to_group":
                there = name.endswith("_device") or name == "combo_position_ids"
                setattr(attention, name, value.to(device) if there else value.pin_memory())
    assert inputs.input_ids is not None
    inputs.input_ids = inputs.input_ids.to(device)
    return inputs


def probe_inputs(layout: Layout, rows: int, phase: Phase = Phase.DECODE) -> ModelInputs:
    """The probe for the output dtype, and the warm-up before capture: all-zero lengths and tables."""
    empty = [Row([0], 0, [[0] for _ in layout.groups]) for _ in range(rows)]
    inputs = model_inputs(layout, phase, empty)
    each = inputs.attention_inputs
    for attention in each.values() if isinstance(each, dict) else [each]:
        for name, value in vars(attention).items():
            if isinstance(value, torch.Tensor) and name != "kv_cache_layer_to_group":
                setattr(attention, name, torch.zeros_like(value))
    return inputs
