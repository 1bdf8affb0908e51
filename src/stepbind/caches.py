"""Typed views over a host's raw cache buffers. Nothing is copied: writing a view writes the host's memory.

Layouts are the engine contract's ("What RTP-LLM hands over", table of `kv_cache_base`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind


@dataclass(frozen=True)
class KVSpec:
    """A full-attention layer's pages. `head_dim` in elements; `dtype` is what the pages hold."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StateSpec:
    """A Gated DeltaNet layer's block: first the recurrent state [value_heads, value_dim, key_dim], right behind it
    the convolution state [conv_width - 1, conv_channels]. The two can differ in dtype."""

    value_heads: int
    value_dim: int
    key_dim: int
    conv_width: int
    conv_channels: int
    state_dtype: torch.dtype
    conv_dtype: torch.dtype

    @property
    def state_bytes(self) -> int:
        return self.value_heads * self.value_dim * self.key_dim * self.state_dtype.itemsize

    @property
    def conv_bytes(self) -> int:
        return (self.conv_width - 1) * self.conv_channels * self.conv_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.state_bytes + self.conv_bytes


@dataclass(frozen=True)
class IndexSpec:
    """The keys of a sparse layer's indexer: one vector of `dim` elements a token."""

    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class LatentSpec:
    """A latent-attention (MLA) layer's pages: `elements` a token, the compressed vector then the rotary key. `index`
    is given for a layer that runs an indexer of its own, None for dense layers and for those that share a choice."""

    elements: int
    dtype: torch.dtype
    index: IndexSpec | None = None


LayerSpec = KVSpec | StateSpec | LatentSpec


@dataclass(frozen=True, eq=False)
class KVPages:
    """key, value: [kernel blocks, KV heads, tokens per kernel block, head dim], strided into one buffer."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class StateSlots:
    """recurrent: [physical blocks, value heads, value dim, key dim]; conv: [physical blocks, width-1, channels]."""

    recurrent: torch.Tensor
    conv: torch.Tensor


@dataclass(frozen=True, eq=False)
class LatentPages:
    """latent: [kernel blocks, tokens per kernel block, elements]; index_key: [kernel blocks, tokens per kernel block,
    index dim] for a layer that runs an indexer."""

    latent: torch.Tensor
    index_key: torch.Tensor | None = None


LayerCache = KVPages | StateSlots | LatentPages


def kv_pages(buffer: torch.Tensor, spec: KVSpec, group: CacheGroup, layer: int) -> KVPages:
    """Key and value pages of a buffer [kernel blocks, 2, KV heads, kernel block size, head dim].

    Raises `StepError` with the numbers for another shape or dtype.
    """
    expected = (group.num_kernel_blocks, 2, spec.num_kv_heads, group.kernel_block_size, spec.head_dim)
    _check_pages(f"layer {layer} attention buffer", buffer, expected, spec.dtype, group)
    return KVPages(key=buffer[:, 0], value=buffer[:, 1])


def latent_pages(
    buffer: torch.Tensor, spec: LatentSpec, group: CacheGroup, layer: int, index_buffer: torch.Tensor | None = None
) -> LatentPages:
    """Latent pages of a buffer [kernel blocks, kernel block size, elements], and for a layer with an indexer its keys
    [kernel blocks, kernel block size, index dim].

    Where the host carries no index keys (`index_buffer` None) the view owns some, in the same blocks: a host that
    copies or offloads blocks has to carry them itself. Their content is undefined, as that of any unwritten page.
    Raises `StepError` for buffers of another shape or dtype, and for index keys of a layer that has no indexer.
    """
    expected = (group.num_kernel_blocks, group.kernel_block_size, spec.elements)
    _check_pages(f"layer {layer} latent buffer", buffer, expected, spec.dtype, group)
    name = f"layer {layer} index key buffer"
    if spec.index is None:
        if index_buffer is not None:
            raise StepError(name, f"shape {tuple(index_buffer.shape)}", "none: the layer runs no indexer")
        return LatentPages(buffer)
    expected = (group.num_kernel_blocks, group.kernel_block_size, spec.index.dim)
    if index_buffer is None:
        index_buffer = torch.empty(expected, dtype=spec.index.dtype, device=buffer.device)
    _check_pages(name, index_buffer, expected, spec.index.dtype, group)
    if index_buffer.device != buffer.device:
        raise StepError(name, f"device {index_buffer.device}", f"{buffer.device} as the latent buffer")
    return LatentPages(buffer, index_buffer)


def state_slots(buffer: torch.Tensor, spec: StateSpec, group: CacheGroup, layer: int) -> StateSlots:
    """Recurrent and convolution state of a buffer [physical blocks, elements or bytes per block], by byte offset.

    Blocks may be longer than the two states need, and the buffer may be strided between blocks. Raises `StepError`
    with all sizes where a block is too short, or where blocks do not start at multiples of an element's bytes.
    """
    name = f"layer {layer} state buffer"
    if buffer.dim() < 2 or buffer.shape[0] != group.num_blocks:
        raise StepError(name, f"shape {tuple(buffer.shape)}", f"[{group.num_blocks} blocks, elements per block]")
    rows = buffer.flatten(1) if buffer.dim() > 2 else buffer
    if rows.stride(1) != 1 or rows.data_ptr() != buffer.data_ptr():
        raise StepError(name, f"strides {buffer.stride()}", "elements of a block next to each other")
    available = rows.shape[1] * buffer.element_size()
    if available < spec.block_bytes:
        raise StepError(
            name,
            f"{available} bytes a block",
            f"at least {spec.block_bytes}: {spec.state_bytes} of recurrent state "
            f"[{spec.value_heads}, {spec.value_dim}, {spec.key_dim}] {spec.state_dtype} and {spec.conv_bytes} of "
            f"convolution state [{spec.conv_width - 1}, {spec.conv_channels}] {spec.conv_dtype}",
        )
    stride = rows.stride(0) * buffer.element_size()
    start = rows.storage_offset() * buffer.element_size()
    for part, offset, dtype in (
        ("recurrent", start, spec.state_dtype),
        ("convolution", start + spec.state_bytes, spec.conv_dtype),
    ):
        if stride % dtype.itemsize or offset % dtype.itemsize:
            raise StepError(
                name,
                f"{part} state at byte {offset} with {stride} bytes from block to block",
                f"multiples of the {dtype.itemsize} bytes of {dtype}",
            )
    raw = rows.view(torch.uint8)
    recurrent = raw[:, : spec.state_bytes].view(spec.state_dtype)
    conv = raw[:, spec.state_bytes : spec.block_bytes].view(spec.conv_dtype)
    return StateSlots(
        recurrent=recurrent.unflatten(1, (spec.value_heads, spec.value_dim, spec.key_dim)),
        conv=conv.unflatten(1, (spec.conv_width - 1, spec.conv_channels)),
    )


def _check_pages(
    name: str, buffer: torch.Tensor, expected: tuple[int, ...], dtype: torch.dtype, group: CacheGroup
) -> None:
    if tuple(buffer.shape) != expected:
        raise StepError(
            name,
            f"shape {tuple(buffer.shape)}",
            f"{expected} ({group.num_blocks} blocks of {group.block_size} tokens, "
            f"{group.ratio} kernel blocks of {group.kernel_block_size} tokens each)",
        )
    if buffer.dtype != dtype:
        raise StepError(name, str(buffer.dtype), str(dtype))


@dataclass(frozen=True)
class BufferKey:
    """All that a view bakes in of the buffer it looks into."""

    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(buffer: torch.Tensor) -> BufferKey:
        return BufferKey(
            buffer.data_ptr(),
            tuple(buffer.shape),
            buffer.stride(),
            int(buffer.storage_offset()),
            buffer.dtype,
            buffer.device,
        )


@dataclass(frozen=True, eq=False)
class _Remembered:
    key: tuple[BufferKey, BufferKey | None, LayerSpec, CacheGroup]  # None: no index keys of the host's
    view: LayerCache


@dataclass(eq=False)
class Caches:
    """The cache views of a model's layers, remembered between steps.

    `update` is cheap where nothing changed; a layer whose buffer, spec or group changed in anything that its view
    bakes in gets a new view, and the old one is dropped. `generation` counts such changes: whatever else baked a
    view in (a captured graph) is stale when it moved. Index keys that the host does not carry live and die with
    their layer's view.
    """

    generation: int = 0
    _layers: dict[int, _Remembered] = field(default_factory=dict)

    @staticmethod
    def of(
        groups: Sequence[CacheGroup],
        specs: Mapping[int, LayerSpec],
        buffers: Mapping[int, torch.Tensor],
        index_buffers: Mapping[int, torch.Tensor] | None = None,
    ) -> Caches:
        caches = Caches()
        caches.update(groups, specs, buffers, index_buffers)
        return caches

    def update(
        self,
        groups: Sequence[CacheGroup],
        specs: Mapping[int, LayerSpec],
        buffers: Mapping[int, torch.Tensor],
        index_buffers: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """Look at the buffers that the host has now, by layer number. `index_buffers`: those of index keys, where the
        host carries them.

        Raises `StepError` for a layer without a group or buffer, a spec that is not of its group's kind, and
        buffers that do not fit (see `kv_pages`, `state_slots`, `latent_pages`); the old views stay then.
        """
        group_of = {layer: group for group in groups for layer in group.layers}
        fresh: dict[int, _Remembered] = {}
        for layer, spec in specs.items():
            if layer not in group_of:
                raise StepError(f"layer {layer}", "no cache group", f"a group among {sorted(group_of)}")
            if layer not in buffers:
                raise StepError(f"layer {layer}", "no cache buffer", "the host's buffer of this layer")
            group, buffer = group_of[layer], buffers[layer]
            index_buffer = index_buffers.get(layer) if index_buffers else None
            key = (BufferKey.of(buffer), None if index_buffer is None else BufferKey.of(index_buffer), spec, group)
            old = self._layers.get(layer)
            if old is not None and old.key == key:
                fresh[layer] = old
            else:
                fresh[layer] = _Remembered(key, layer_view(buffer, spec, group, layer, index_buffer))
        same = fresh.keys() == self._layers.keys()
        if not same or any(fresh[layer] is not self._layers[layer] for layer in fresh):
            self._layers = fresh
            self.generation += 1

    def __getitem__(self, layer: int) -> LayerCache:
        if layer not in self._layers:
            raise StepError("layer", layer, f"one with a cache view: {sorted(self._layers)}")
        return self._layers[layer].view


_KIND_OF_SPEC = {KVSpec: GroupKind.ATTENTION, StateSpec: GroupKind.STATE, LatentSpec: GroupKind.LATENT}


def layer_view(
    buffer: torch.Tensor,
    spec: LayerSpec,
    group: CacheGroup,
    layer: int,
    index_buffer: torch.Tensor | None = None,
) -> LayerCache:
    """The typed view of one layer's buffer. Raises `StepError` where spec, group and buffer do not fit."""
    kind = _KIND_OF_SPEC[type(spec)]
    if kind is not group.kind:
        raise StepError(f"layer {layer}", f"group {group.name!r} of kind {group.kind.value}", f"kind {kind.value}")
    if index_buffer is not None and not isinstance(spec, LatentSpec):
        name = f"layer {layer} index key buffer"
        raise StepError(name, f"shape {tuple(index_buffer.shape)}", f"none: the layer is of kind {kind.value}")
    if isinstance(spec, KVSpec):
        return kv_pages(buffer, spec, group, layer)
    if isinstance(spec, StateSpec):
        return state_slots(buffer, spec, group, layer)
    return latent_pages(buffer, spec, group, layer, index_buffer)
