"""Passes, models and runtimes for a bridge under the double."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.targets.atom_double import modules as atom


class Cache:
    """RTP's older `kv_cache`."""

    def __init__(self, bases: dict[int, torch.Tensor | None], block_size: int, kernel_block_size: int) -> None:
        self.seq_size_per_block, self.kernel_seq_size_per_block = block_size, kernel_block_size
        self.layers = {layer: SimpleNamespace(kv_cache_base=base, kv_scale_base=None) for layer, base in bases.items()}

    def get_layer_cache(self, layer: int) -> Any:
        return self.layers[layer]


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def hybrid_model(layers: int = 4) -> nn.Module:
    """Every fourth layer is paged attention, the others are Gated DeltaNet."""
    return nn.ModuleList([atom.PagedAttention(i) if i % 4 == 3 else atom.GatedDeltaNet(i) for i in range(layers)])


def plain_model(layers: int = 2) -> nn.Module:
    return nn.ModuleList([atom.PagedAttention(i) for i in range(layers)])


def latent_model(layers: int = 2) -> nn.Module:
    return nn.ModuleList([atom.SparseMLA(i) for i in range(layers)])


def runtime_for(
    model: nn.Module, block_size: int, kernel_block_size: int, num_blocks: int, device: str = "cpu"
) -> SimpleNamespace:
    """With buffers for each layer, in the engine contract's layouts."""
    ratio = block_size // kernel_block_size
    bases: dict[int, torch.Tensor | None] = {}
    for module in model:
        if isinstance(module, atom.GatedDeltaNet):
            bases[module.layer_num] = torch.zeros(num_blocks, 4 * 8 * 8 + 3 * 64 + 5, device=device)
        elif isinstance(module, atom.SparseMLA):
            bases[module.layer_num] = torch.zeros(num_blocks * ratio, kernel_block_size, 6, device=device)
        else:
            bases[module.layer_num] = torch.zeros(num_blocks * ratio, 2, 1, kernel_block_size, 4, device=device)
    return SimpleNamespace(kv_cache=Cache(bases, block_size, kernel_block_size))


def pass_inputs(
    *,
    prefill: bool,
    query: list[int],
    prior: list[int],
    tables: list[list[list[int]]] | list[torch.Tensor],
    store: Any = None,
    layer_to_group: list[int] | None = None,
    plus_one: bool | None = None,
    placeholder: bool | None = None,
) -> SimpleNamespace:
    """`inputs` with attention inputs. plus_one: give the plus-one field (default: in decode). placeholder: cu_seqlens
    all zero (default: in decode)."""
    none = torch.empty(0, dtype=torch.int32)
    rows = len(query)
    groups = [table if isinstance(table, torch.Tensor) else int32(table) for table in tables]
    start = torch.zeros(rows + 1, dtype=torch.int32)
    if not (placeholder if placeholder is not None else not prefill):
        start[1:] = int32(query).cumsum(0)
    with_plus_one = plus_one if plus_one is not None else not prefill
    context = int32([n + q for n, q in zip(prior, query, strict=True)])
    attention = SimpleNamespace(
        is_prefill=prefill,
        is_cuda_graph=False,
        input_lengths=int32(query),
        input_lengths_device=int32(query),
        prefix_lengths=int32(prior) if prefill else none,
        prefix_lengths_device=int32(prior) if prefill else none,
        sequence_lengths=none if prefill else int32(prior),
        sequence_lengths_plus_1_device=context if with_plus_one else none,
        cu_seqlens=start,
        cu_seqlens_device=start.clone(),
        kv_cache_kernel_block_id_device=groups[0],
        kv_cache_kernel_block_id_device_by_group=groups if len(groups) > 1 else None,
        kv_cache_block_id_device=none if store is None else int32(store) if isinstance(store, list) else store,
        kv_cache_layer_to_group=None if layer_to_group is None else int32(layer_to_group),
    )
    return SimpleNamespace(attention_inputs=attention)


def on_device(inputs: SimpleNamespace, device: str) -> SimpleNamespace:
    """The same with what RTP has on the device there, and the host's mirrors pinned."""
    moved = {}
    for name, value in vars(inputs.attention_inputs).items():
        if name.endswith("_by_group") and value is not None:
            value = [table.to(device) for table in value]
        elif isinstance(value, torch.Tensor) and name != "kv_cache_layer_to_group":
            if name.endswith("_device"):
                value = value.to(device)
            elif device != "cpu":
                value = value.pin_memory()
        moved[name] = value
    return SimpleNamespace(attention_inputs=SimpleNamespace(**moved))


def positions_of(query: list[int], prior: list[int]) -> torch.Tensor:
    return int32([n + i for n, q in zip(prior, query, strict=True) for i in range(q)])


def random_pass(
    rng: random.Random, *, groups: int, ratio: int, compact: bool = False, size: int = 8
) -> tuple[SimpleNamespace, torch.Tensor]:
    """A good pass: every needed block is there. The first table is in kernel blocks (not if `compact`), the store's
    physical one beside it half of the time. Group 0 is the attention group."""
    prefill, rows = rng.random() < 0.5, rng.randint(1, 6)
    prior = [rng.randint(0 if prefill else 1, 40) for _ in range(rows)]
    query = [rng.randint(1, 20) if prefill else 1 for _ in range(rows)]
    columns = -(-max(n + q for n, q in zip(prior, query, strict=True)) // size) + rng.randint(0, 2)
    physical = [[[rng.randint(1, 99) for _ in range(columns)] for _ in range(rows)] for _ in range(groups)]
    expand = 1 if compact else ratio
    kernel = [[[b * expand + i for b in row for i in range(expand)] for row in table] for table in physical[:1]]
    inputs = pass_inputs(
        prefill=prefill,
        query=query,
        prior=prior,
        tables=[int32(table) for table in [*kernel, *physical[1:]]],
        store=physical[0] if ratio == 1 or rng.random() < 0.5 else None,
        layer_to_group=[1 + i % (groups - 1) if i % 4 != 3 else 0 for i in range(4)] if groups > 1 else None,
        plus_one=rng.choice((None, True)),
        placeholder=rng.choice((None, True)),
    )
    return inputs, positions_of(query, prior)
