"""Cache groups on RTP-LLM's memory, and what the ids of its tables count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stepbind.caches import KVSpec, LayerSpec, StateSpec
from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.hosts.rtp_llm.reader import HostMemory, HostSizes, HostTable
from stepbind.layers import Layer
from stepbind.step import Granularity

BYTES = (torch.uint8, torch.int8)
"""Buffers of these hold states of other dtypes; offsets in them are bytes."""


@dataclass(frozen=True)
class GroupSource:
    """A cache group and the host's table (its index) that it takes its blocks from.

    Where layers of several kinds share one of the host's groups, there is a cache group for each kind, and `is_shared`.
    """

    group: CacheGroup
    table: int
    is_shared: bool


def group_sources(
    layers: Sequence[Layer], memory: HostMemory, tags: Sequence[str], layer_to_group: Sequence[int] | None
) -> tuple[GroupSource, ...]:
    """The cache groups of a model's layers, in the order in which they first occur.

    tags: of the pass's tables. layer_to_group: the host's number of each layer's table, where it says it.
    Raises `StepError` for a layer whose table is not among the pass's, and for buffers of a group that differ in their
    number of blocks or hold no whole number of them.
    """
    members: dict[tuple[int, GroupKind], list[Layer]] = {}
    for layer in layers:
        table = _table_of_layer(layer.index, memory, tags, layer_to_group)
        members.setdefault((table, layer.kind), []).append(layer)
    tables = [table for table, _ in members]
    sources = []
    for (table, kind), of_group in members.items():
        tag = _tag_of(of_group[0].index, memory, tags[table])
        is_shared = tables.count(table) > 1
        sizes = _sizes_of(memory, tag)
        name = f"{tag or 'all'}.{kind.value}" if is_shared or not tag else tag
        group = CacheGroup(
            name=name,
            kind=kind,
            layers=tuple(layer.index for layer in of_group),
            block_size=sizes.block_size,
            kernel_block_size=sizes.kernel_block_size,
            num_blocks=_num_blocks(name, kind, of_group, memory, sizes),
        )
        sources.append(GroupSource(group, table, is_shared))
    return tuple(sources)


def granularity_of(
    source: GroupSource, table: HostTable, max_context: int | None, unclear: Granularity | None = None
) -> Granularity:
    """What the ids of a group's table count. max_context: tokens of the longest row, None where only the device knows.
    unclear: what to take where nothing tells; None makes that an error.

    RTP expands the tables of attention groups to kernel blocks, ratio ids for each physical block, and leaves those of
    recurrent groups as they are (one id a block), unless the physical table beside it shows otherwise. An attention
    group's table of other than a multiple of `ratio` columns is in physical blocks, as is one with too few columns for
    the lengths if they were kernel blocks (seed behaviour 24).
    Raises `StepError` where the physical table beside it has as many columns: then only the host can know.
    """
    group, columns = source.group, table.blocks.shape[1]
    if group.ratio == 1 or columns % group.ratio:
        return Granularity.PHYSICAL
    if group.kind is GroupKind.STATE and not source.is_shared:
        expanded = table.store_columns is not None and columns == table.store_columns * group.ratio
        return Granularity.KERNEL if expanded else Granularity.PHYSICAL
    if max_context is not None and columns * group.kernel_block_size < max_context:
        return Granularity.PHYSICAL
    if table.store_columns == columns:
        if unclear is not None:
            return unclear
        raise StepError(
            f"block table of group {group.name!r}",
            f"{columns} columns, as many as the physical table, and enough for {max_context} tokens either way",
            "a table whose width tells kernel blocks from physical ones (or an explicit granularity)",
        )
    return Granularity.KERNEL


def spec_on(buffer: torch.Tensor, layer: Layer) -> LayerSpec:
    """A layer's spec with what the host's buffer decides: KV heads that the host repeats for tensor parallelism (it
    keeps the global count where there are fewer heads than ranks), and the dtype of recurrent states in a buffer that
    is not bytes."""
    spec = layer.spec
    if isinstance(spec, KVSpec) and buffer.dim() == 5 and buffer.shape[2] % spec.num_kv_heads == 0:
        return replace(spec, num_kv_heads=buffer.shape[2])
    if isinstance(spec, StateSpec) and buffer.dtype not in BYTES:
        return replace(spec, state_dtype=buffer.dtype, conv_dtype=buffer.dtype)
    return spec


def _table_of_layer(layer: int, memory: HostMemory, tags: Sequence[str], layer_to_group: Sequence[int] | None) -> int:
    if memory.tag_of_layer is not None and memory.tag_of_layer[layer] in tags:
        return tags.index(memory.tag_of_layer[layer])
    if len(tags) == 1:
        return 0
    if layer_to_group is None:
        raise StepError("attention_inputs.kv_cache_layer_to_group", "none", f"the group of layer {layer} among {tags}")
    if layer >= len(layer_to_group):
        raise StepError("attention_inputs.kv_cache_layer_to_group", f"{len(layer_to_group)} layers", f"layer {layer}")
    number = layer_to_group[layer]
    if not 0 <= number < len(tags):
        raise StepError(
            f"attention_inputs.kv_cache_layer_to_group[{layer}]", number, f"a group number, 0 .. {len(tags) - 1}"
        )
    return number


def _tag_of(layer: int, memory: HostMemory, table_tag: str) -> str:
    return table_tag if memory.tag_of_layer is None else memory.tag_of_layer[layer]


def _sizes_of(memory: HostMemory, tag: str) -> HostSizes:
    if memory.sizes is not None:
        return memory.sizes[tag]
    assert memory.default_sizes is not None
    return memory.default_sizes


def _num_blocks(name: str, kind: GroupKind, layers: Sequence[Layer], memory: HostMemory, sizes: HostSizes) -> int:
    """Physical blocks of a group: its buffers count kernel blocks, those of a recurrent group physical ones."""
    counts = {memory.buffers[layer.index].shape[0] for layer in layers}
    if len(counts) != 1:
        raise StepError(f"group {name!r} kv_cache_base", f"{sorted(counts)} blocks", "as many in each of its layers")
    count = counts.pop()
    ratio = 1 if kind is GroupKind.STATE else sizes.block_size // sizes.kernel_block_size
    if count % ratio:
        raise StepError(f"group {name!r} kv_cache_base", f"{count} kernel blocks", f"a multiple of {ratio}")
    return count // ratio
