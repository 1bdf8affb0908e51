"""What is kept on a runtime between passes: the cache views, the groups, and where sparse MLA layers take their caches.

Each is looked at again in every pass, and made again where what it was made of has changed: buffers, groups, and which
modules the layers are. What hangs on a sparse layer's modules is found once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch

from stepbind.targets.atom.api import AtomApi
from stepbind.targets.atom.groups import AtomGroups, atom_groups
from stepbind.targets.atom.memory import AttachPoint, CacheViews, LayerMaps, attach_points
from stepbind.targets.atom.native import native
from stepbind.targets.atom.passes import PlanBuffers
from stepbind.targets.atom.read import AtomPass


@dataclass(eq=False)
class Kept:
    """Beside what ATOM's own bridge keeps on a runtime. buffers: for `groups.sources`."""

    views: CacheViews | None = None
    groups: AtomGroups | None = None
    groups_key: object = None
    buffers: PlanBuffers = field(default_factory=PlanBuffers)
    points: list[AttachPoint] | None = None
    points_key: object = None
    layer_numbers: _LayerNumbers | None = None


def kept_on(runtime: Any) -> Kept:
    kept: Kept | None = getattr(runtime, "_stepbind_kept", None)
    if kept is None:
        kept = runtime._stepbind_kept = Kept()
    return kept


def update_views(kept: Kept, runtime: Any, maps: LayerMaps, api: AtomApi) -> dict[str, Any]:
    """Cache views, on the runtime under the reference's names (seed behaviour 18)."""
    views = kept.views
    if (
        views is None
        or getattr(runtime, "_rtp_kv_cache_data", None) is not views.tensors
        or not views.are_of(runtime.kv_cache, maps)
    ):
        views = kept.views = CacheViews(runtime.kv_cache, maps, api)
        runtime._rtp_kv_cache_data, runtime._rtp_kv_cache_signature = views.tensors, views.signature
        kept.groups_key = kept.points_key = None
    return views.tensors


def update_groups(kept: Kept, runtime: Any, maps: LayerMaps, host: AtomPass) -> AtomGroups:
    """Groups, kept while the host's map, sizes and buffers are the same (seed behaviour 19: by content).

    Raises `BlockFaultError` for faults of earlier passes where the groups are others now.
    """
    numbers = _numbers_of_layers(kept, runtime, host.layer_to_group)
    groups = kept_groups(kept, runtime.kv_cache, numbers, host.tags, len(host.tables))
    if groups is None:
        groups = atom_groups(runtime.kv_cache, maps, host, numbers)
        if kept.groups is None or kept.groups.sources != groups.sources:
            kept.buffers.check()  # waits, once: nobody looks at the faults counted there afterwards
            kept.buffers = PlanBuffers()
        kept.groups, kept.groups_key = groups, _groups_key(runtime.kv_cache, numbers, host.tags, len(host.tables))
        runtime._rtp_layer_group_map = groups.layer_to_group
    return groups


def kept_groups(
    kept: Kept, kv_cache: Any, numbers: tuple[int, ...], tags: tuple[str, ...], num_tables: int
) -> AtomGroups | None:
    """None where they are others now. Good while the views are: look at those first."""
    if kept.groups_key is None or _groups_key(kv_cache, numbers, tags, num_tables) != kept.groups_key:
        return None
    return kept.groups


def kept_numbers(kept: Kept, tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    """The group numbers of layers that a tensor on the host holds; None where they are others now."""
    if tensor is None or not tensor.numel():
        return ()
    last = kept.layer_numbers
    if last is None or native is None or not isinstance(content := last.key[0], bytes):
        return None
    return last.numbers if native.is_content(tensor, content) else None


def _content(array: npt.NDArray[Any]) -> tuple[object, ...]:
    return array.tobytes(), array.dtype


def _groups_key(kv_cache: Any, numbers: tuple[int, ...], tags: tuple[str, ...], num_tables: int) -> object:
    sizes = (getattr(kv_cache, "seq_size_per_block", None), getattr(kv_cache, "kernel_seq_size_per_block", None))
    return numbers, sizes, tags, num_tables


def update_points(kept: Kept, latent: dict[int, Any], block_size: int, api: AtomApi) -> list[AttachPoint]:
    """Where the caches of these layers go, while those and their views are the same."""
    assert kept.views is not None
    key = (tuple(latent.items()), block_size, api.fp8)  # a copy: the caller's own may change in place
    if kept.points is None or key != kept.points_key:
        kept.points, kept.points_key = attach_points(latent, kept.views.tensors, block_size, api.fp8), key
    return kept.points


@dataclass(frozen=True, eq=False)
class _LayerNumbers:
    """A tensor of group numbers as numbers. key: its content where it is on the host; one on a device is read once, and
    known by its place."""

    key: tuple[object, ...]
    tensor: torch.Tensor  # held, so that its address is nobody else's
    numbers: tuple[int, ...]


def _numbers_of_layers(kept: Kept, runtime: Any, tensor: torch.Tensor | None) -> tuple[int, ...]:
    if tensor is None:
        return ()
    key = _content(tensor.numpy()) if tensor.is_cpu else (tensor.data_ptr(), tensor.shape, tensor.dtype)
    last = kept.layer_numbers
    if last is None or key != last.key:
        last = kept.layer_numbers = _LayerNumbers(key, tensor, tuple(tensor.tolist()))
        runtime._rtp_layer_group_map_signature = last.numbers
    return last.numbers
