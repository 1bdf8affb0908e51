"""The local host's cache memory: one raw buffer a layer, laid out as an engine lays it out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepbind.caches import KVSpec, LatentSpec, StateSpec
from stepbind.errors import StepError
from stepbind.groups import CacheGroup
from stepbind.layers import Layer

STATE_ALIGNMENT = 256
"""Bytes that a state block's length is rounded up to; views must cope with blocks longer than they need."""


def allocate_buffers(
    layers: Sequence[Layer], groups: Sequence[CacheGroup], device: torch.device
) -> dict[int, torch.Tensor]:
    """A raw buffer for each layer, by layer number (layouts: engine contract, table of `kv_cache_base`)."""
    group_of = {layer: group for group in groups for layer in group.layers}
    return {layer.index: _allocate(layer, group_of[layer.index], device) for layer in layers}


def allocate_index_buffers(
    layers: Sequence[Layer], groups: Sequence[CacheGroup], device: torch.device
) -> dict[int, torch.Tensor]:
    """Index keys [kernel blocks, kernel block size, index dim] for each layer that runs an indexer, by layer number."""
    group_of = {layer: group for group in groups for layer in group.layers}
    buffers = {}
    for layer in layers:
        if isinstance(layer.spec, LatentSpec) and layer.spec.index is not None:
            group, index = group_of[layer.index], layer.spec.index
            shape = (group.num_kernel_blocks, group.kernel_block_size, index.dim)
            buffers[layer.index] = torch.zeros(shape, dtype=index.dtype, device=device)
    return buffers


def _allocate(layer: Layer, group: CacheGroup, device: torch.device) -> torch.Tensor:
    spec = layer.spec
    if isinstance(spec, KVSpec):
        shape = (group.num_kernel_blocks, 2, spec.num_kv_heads, group.kernel_block_size, spec.head_dim)
        return torch.zeros(shape, dtype=spec.dtype, device=device)
    if isinstance(spec, StateSpec):
        length = -(-spec.block_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
        return torch.zeros(group.num_blocks, length, dtype=torch.uint8, device=device)
    if isinstance(spec, LatentSpec):
        return torch.zeros(
            group.num_kernel_blocks, group.kernel_block_size, spec.elements, dtype=spec.dtype, device=device
        )
    raise StepError(f"layer {layer.index}", type(spec).__name__, "a spec that the local host allocates for")
