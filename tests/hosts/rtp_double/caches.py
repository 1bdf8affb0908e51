"""RTP's `kv_cache`, in both generations, over raw buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepbind.groups import CacheGroup


@dataclass
class LayerKVCache:
    """One layer's cache; the newer generation says its group."""

    kv_cache_base: torch.Tensor | None
    kv_scale_base: torch.Tensor | None = None
    seq_size_per_block: int = 0
    layer_id: int = 0
    group_id: int = 0
    tag: str | None = None


class OlderKVCache:
    """Sizes as attributes, of all groups; which layer is in which group is said by the pass."""

    def __init__(self, groups: tuple[CacheGroup, ...], buffers: dict[int, torch.Tensor], num_kv_heads: int = 0) -> None:
        self.seq_size_per_block = groups[0].block_size
        self.kernel_seq_size_per_block = groups[0].kernel_block_size
        self.num_kv_heads = num_kv_heads
        self._layers = {layer: LayerKVCache(buffer) for layer, buffer in buffers.items()}

    def get_layer_cache(self, layer: int) -> LayerKVCache:
        return self._layers[layer]


class NewerKVCache:
    """Groups by tag, with sizes of their own."""

    def __init__(self, groups: tuple[CacheGroup, ...], buffers: dict[int, torch.Tensor]) -> None:
        self._groups = {group.name: group for group in groups}
        self.group_tags = list(self._groups)
        self.layer_count = len(buffers)
        self._layers = {
            layer: LayerKVCache(buffers[layer], None, group.block_size, layer, number, group.name)
            for number, group in enumerate(groups)
            for layer in group.layers
        }

    def get_layer_cache(self, layer: int, tag: str | None = None) -> LayerKVCache:
        return self._layers[layer]

    def get_layer_cache_groups(self, layer: int) -> list[LayerKVCache]:
        return [self._layers[layer]]

    def get_seq_size_per_block(self, tag: str) -> int:
        return self._groups[tag].block_size

    def get_kernel_seq_size_per_block(self, tag: str) -> int:
        return self._groups[tag].kernel_block_size


def kv_cache(
    generation: str, groups: tuple[CacheGroup, ...], buffers: dict[int, torch.Tensor]
) -> OlderKVCache | NewerKVCache:
    return (NewerKVCache if generation == "newer" else OlderKVCache)(groups, buffers)
