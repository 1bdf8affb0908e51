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

    def elements_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


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
class LatentSpec:
    """A latent-attention (MLA) layer's pages: `elements` a token, the compressed vector then the rotary key."""

    elements: int
    dtype: torch.dtype


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
    """latent: [kernel blocks, tokens per kernel block, elements]."""

    latent: torch.Tensor


LayerCache = KVPages | StateSlots | LatentPages


def kv_pages(buffer: torch.Tensor, spec: KVSpec, group: CacheGroup, layer: int) -> KVPages:
    """Key and value pages of a buffer [kernel blocks, 2, KV heads, kernel block size, head dim].

    Raises `StepError` with the numbers for another shape or dtype.
    """
    expected = (group.num_kernel_blocks, 2, spec.num_kv_heads, group.kernel_block_size, spec.head_dim)
    _check_pages(buffer, expected, spec.dtype, group, layer)
    return KVPages(key=buffer[:, 0], value=buffer[:, 1])


def latent_pages(buffer: torch.Tensor, spec: LatentSpec, group: CacheGroup, layer: int) -> LatentPages:
    """Latent pages of a buffer [kernel blocks, kernel block size, elements]. Raises `StepError` for another one."""
    expected = (group.num_kernel_blocks, group.kernel_block_size, spec.elements)
    _check_pages(buffer, expected, spec.dtype, group, layer)
    return LatentPages(latent=buffer)


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
    buffer: torch.Tensor, expected: tuple[int, ...], dtype: torch.dtype, group: CacheGroup, layer: int
) -> None:
    name = f"layer {layer} {group.kind.value} buffer"
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
    key: tuple[BufferKey, LayerSpec, CacheGroup]
    view: LayerCache


@dataclass(eq=False)
class Caches:
    """The cache views of a model's layers, remembered between steps.

    `update` is cheap where nothing changed; a layer whose buffer, spec or group changed in anything that its view
    bakes in gets a new view, and the old one is dropped. `generation` counts such changes: whatever else baked a
    view in (a captured graph) is stale when it moved.
    """

    generation: int = 0
    _layers: dict[int, _Remembered] = field(default_factory=dict)

    @staticmethod
    def of(
        groups: Sequence[CacheGroup],
        specs: Mapping[int, LayerSpec],
        buffers: Mapping[int, torch.Tensor],
    ) -> Caches:
        caches = Caches()
        caches.update(groups, specs, buffers)
        return caches

    def update(
        self,
        groups: Sequence[CacheGroup],
        specs: Mapping[int, LayerSpec],
        buffers: Mapping[int, torch.Tensor],
    ) -> None:
        """Look at the buffers that the host has now, by layer number.

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
            key = (BufferKey.of(buffer), spec, group)
            old = self._layers.get(layer)
            if old is not None and old.key == key:
                fresh[layer] = old
            else:
                fresh[layer] = _Remembered(key, layer_view(buffer, spec, group, layer))
        same = fresh.keys() == self._layers.keys()
        if not same or any(fresh[layer] is not self._layers[layer] for layer in fresh):
            self._layers = fresh
            self.generation += 1

    def __getitem__(self, layer: int) -> LayerCache:
        if layer not in self._layers:
            raise StepError("layer", layer, f"one with a cache view: {sorted(self._layers)}")
        return self._layers[layer].view


_KIND_OF_SPEC = {KVSpec: GroupKind.ATTENTION, StateSpec: GroupKind.STATE, LatentSpec: GroupKind.LATENT}


def layer_view(buffer: torch.Tensor, spec: LayerSpec, group: CacheGroup, layer: int) -> LayerCache:
    """The typed view of one layer's buffer. Raises `StepError` where spec, group and buffer do not fit."""
    kind = _KIND_OF_SPEC[type(spec)]
    if kind is not group.kind:
        raise StepError(f"layer {layer}", f"group {group.name!r} of kind {group.kind.value}", f"kind {kind.value}")
    if isinstance(spec, KVSpec):
        return kv_pages(buffer, spec, group, layer)
    if isinstance(spec, StateSpec):
        return state_slots(buffer, spec, group, layer)
    return latent_pages(buffer, spec, group, layer)
