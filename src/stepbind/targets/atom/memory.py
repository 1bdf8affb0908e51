"""ATOM's layers and the cache views that they read, over RTP-LLM's cache."""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import torch

from stepbind.caches import StateSpec, state_slots
from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.targets.atom.api import AtomApi
from stepbind.targets.atom.native import native

LayerMaps = tuple[dict[int, Any], dict[int, Any], dict[int, Any]]
"""Modules by layer number: Gated DeltaNet, paged attention, sparse MLA (the outer module where there is one)."""

_base = attrgetter("kv_cache_base")
BYTES = (torch.uint8, torch.int8)


def collect_layers(model: Any, api: AtomApi) -> LayerMaps:
    """Seed behaviour 15."""
    gdn: dict[int, Any] = {}
    paged: dict[int, Any] = {}
    latent: dict[int, Any] = {}
    for module in model.modules():
        number = getattr(module, "layer_num", None)
        if isinstance(module, api.gated_delta_net):
            gdn[int(module.layer_num)] = module  # type: ignore[attr-defined]
        elif (
            getattr(module, "indexer", None) is not None
            and getattr(module, "mla_attn", None) is not None
            and number is not None
        ):
            latent[int(number)] = module  # the owner: before or after its inner attention was seen
        elif isinstance(module, api.mla_attention):
            layer_id = getattr(module, "layer_id", None)
            owner = number if layer_id is None else layer_id
            if owner is not None:
                latent.setdefault(int(owner), module)
        elif isinstance(module, api.paged_attention):
            inner = getattr(getattr(module, "impl", None), "layer_num", None)
            owner = number if inner is None else inner
            if owner is not None:
                paged[int(owner)] = module
    return gdn, paged, latent


def layer_numbers(maps: LayerMaps) -> list[int]:
    return sorted({*maps[0], *maps[1], *maps[2]})


class CacheViews:
    """The cache views of a runtime's layers, and all that they bake in of its buffers: pointer, shape, stride, offset,
    dtype, device, of the scales too (seed behaviour 18).

    A tensor object that is held stands for its dtype and device itself: whoever changes those makes a new one. The rest
    can change in place (`set_`, `resize_`); an alias beside it stays as it was.

    Raises `StepError` as `cache_tensors`.
    """

    def __init__(self, kv_cache: Any, maps: LayerMaps, api: AtomApi) -> None:
        self.tensors = cache_tensors(kv_cache, maps, api)
        self._kv_cache, self._maps = kv_cache, maps
        self._numbers = layer_numbers(maps)
        self._buffers = _buffers(kv_cache, self._numbers)
        self._aliases = [buffer.detach() for buffer in self._buffers]
        self._places = None if native is None else native.places(self._buffers)
        places = ((buffer.data_ptr(), buffer.shape, buffer.stride(), buffer.dtype) for buffer in self._buffers)
        self.signature = (id(kv_cache), *places)

    def are_of(self, kv_cache: Any, maps: LayerMaps) -> bool:
        """Whether they are still good for this cache and these layers."""
        if kv_cache is not self._kv_cache or not (maps is self._maps or maps == self._maps):
            return False
        if self._places is not None:
            return native.are_at(kv_cache.get_layer_cache, self._numbers, self._buffers, self._places)
        buffers, own = _buffers(kv_cache, self._numbers), self._buffers
        return (
            len(buffers) == len(own)
            and all(map(is_, buffers, own))
            and all(map(torch.Tensor.is_set_to, buffers, self._aliases))
        )


def _buffers(kv_cache: Any, numbers: list[int]) -> list[Any]:
    """The buffer of each layer, and behind them the scales that there are."""
    caches = list(map(kv_cache.get_layer_cache, numbers))
    buffers = list(map(_base, caches))
    scales = list(map(getattr, caches, repeat("kv_scale_base"), repeat(None)))
    if any(map(is_not, scales, repeat(None))):
        buffers += [scale for scale in scales if scale is not None]
    return buffers


def cache_tensors(kv_cache: Any, maps: LayerMaps, api: AtomApi) -> dict[str, Any]:
    """ATOM's `KVCacheTensor` of each layer, by "layer_{number}": for Gated DeltaNet the convolution state as k_cache
    [slots, channels, width-1] and the recurrent state as v_cache [slots, value heads, value dim, key dim], for the
    others the host's layer cache as it is (seed behaviours 16 and 17).

    Raises `StepError` naming the layer for a buffer that is missing, 0-dimensional or too short.
    """
    tensors = {}
    for number in layer_numbers(maps):
        cache = kv_cache.get_layer_cache(number)
        base = getattr(cache, "kv_cache_base", None)
        if base is None:
            raise StepError(f"layer {number} kv_cache_base", "none", "the layer's cache buffer")
        if base.dim() == 0:
            raise StepError(f"layer {number} kv_cache_base", "a tensor of no dimensions", "[blocks, ...]")
        conv, state = cache, None
        if number in maps[0]:
            conv, state = _gdn_views(base, maps[0][number], number)
        tensors[f"layer_{number}"] = api.kv_cache_tensor(
            layer_num=number, k_cache=conv, v_cache=state, k_scale=None, v_scale=None
        )
    return tensors


def _gdn_views(base: torch.Tensor, module: Any, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    if base.dim() == 1:
        base = base[:, None]
    weight = module.conv1d.weight  # [channels, 1, width]: the rank's own
    is_bytes = base.dtype in BYTES
    spec = StateSpec(
        value_heads=module.dt_bias.numel(),
        value_dim=module.head_v_dim,
        key_dim=module.head_k_dim,
        conv_width=weight.shape[2],
        conv_channels=weight.shape[0],
        state_dtype=torch.float32 if is_bytes else base.dtype,
        conv_dtype=weight.dtype if is_bytes else base.dtype,
    )
    blocks = base.shape[0]
    group = CacheGroup(f"layer {number}", GroupKind.STATE, (number,), 1, 1, blocks, first_block=min(1, blocks - 1))
    slots = state_slots(base, spec, group, number)
    return slots.conv.transpose(1, 2), slots.recurrent


class AttachPoint(NamedTuple):
    """Where a sparse MLA layer keeps its caches, and what comes there. owner: the inner attention, or the layer itself.
    holder: what has the list of its indexer's caches, None where there is none. index_keys: None for none."""

    owner: Any
    cache: Any
    holder: Any
    index_keys: torch.Tensor | None


def attach_points(
    latent: dict[int, Any], tensors: dict[str, Any], block_size: int, fp8: torch.dtype
) -> list[AttachPoint]:
    """Of all sparse MLA layers that have a cache. Raises `StepError` for a block size that gives no index keys."""
    points = []
    for number, layer in latent.items():
        tensor = tensors.get(f"layer_{number}")
        if tensor is None:
            continue
        owner = getattr(layer, "mla_attn", layer)
        indexer = getattr(layer, "indexer", None)
        if indexer is None:
            indexer = getattr(owner, "indexer", None)
        holder, dim = getattr(indexer, "k_cache", None), int(getattr(indexer, "head_dim", 0) or 0)
        keys = None
        if dim > 0 and _slots(holder):
            if block_size <= 0:
                raise StepError(f"layer {number} block size", block_size, "at least 1 token, for the index keys")
            keys = index_keys(owner, tensor.k_cache.kv_cache_base, dim, block_size, fp8)
        points.append(AttachPoint(owner, tensor.k_cache, holder, keys))
    return points


def _slots(holder: Any) -> list[Any] | None:
    slots = getattr(holder, "kv_cache", None)
    return slots if isinstance(slots, list) and slots else None


class Attached:
    """Sparse MLA layers' caches in their places, and what stood there before (seed behaviour 20)."""

    def __init__(self, points: list[AttachPoint]) -> None:
        self._points = points
        self._attributes: list[tuple[Any, Any]] = []
        self._entries: list[tuple[list[Any], Any]] = []

    def attach(self) -> None:
        was, entries = self._attributes, self._entries
        for owner, cache, holder, keys in self._points:
            attributes = owner.__dict__
            if "kv_cache" in attributes:  # past `nn.Module`'s bookkeeping, which has nothing to do with it
                was.append((attributes, attributes["kv_cache"]))
                attributes["kv_cache"] = cache
            else:
                was.append((owner, getattr(owner, "kv_cache", None)))
                owner.kv_cache = cache
            if keys is not None:
                slots = getattr(holder, "kv_cache", None)
                if isinstance(slots, list) and slots:
                    entries.append((slots, slots[0]))
                    slots[0] = keys

    def restore(self) -> None:
        """In reverse order."""
        for slots, before in reversed(self._entries):
            slots[0] = before
        for owner, before in reversed(self._attributes):
            if type(owner) is dict:
                owner["kv_cache"] = before
            else:
                owner.kv_cache = before


def index_keys(owner: Any, base: torch.Tensor, dim: int, block_size: int, fp8: torch.dtype) -> torch.Tensor:
    """The fp8 index keys [tokens, 1, dim + 4 rounded up to 16] of a layer, kept on it while they fit its cache."""
    shape = (base.shape[0] * block_size, 1, -(-(dim + 4) // 16) * 16)
    kept = vars(owner).get("_rtp_indexer_kv_cache")
    if kept is None or kept.shape != shape or kept.dtype != fp8 or kept.device != base.device:
        kept = torch.empty(shape, device=base.device, dtype=fp8)
        owner._rtp_indexer_kv_cache = kept
    return kept  # type: ignore[no-any-return]
