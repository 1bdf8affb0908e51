"""The three context classes, with the public surface of ATOM's own bridge."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch

from stepbind.errors import StepError
from stepbind.hosts.rtp_llm.groups import GroupSource
from stepbind.targets.atom import api as atom
from stepbind.targets.atom.assemble import attention_metadata, gdn_metadata, state_caches
from stepbind.targets.atom.computed import Computed
from stepbind.targets.atom.groups import AtomGroups, atom_groups
from stepbind.targets.atom.memory import (
    Attached,
    AttachPoint,
    LayerMaps,
    attach_points,
    cache_key,
    cache_tensors,
    collect_layers,
    layer_numbers,
)
from stepbind.targets.atom.metadata import HYBRID, PLAIN, SPARSE_MLA, Profile
from stepbind.targets.atom.passes import PlanBuffers, compute_by_plan, compute_captured, compute_on_host
from stepbind.targets.atom.read import AtomPass, read
from stepbind.targets.atom.states import state_slots_of_layer


@dataclass(eq=False)
class _Kept:
    """What is kept on a runtime between passes, beside what ATOM's own bridge keeps there."""

    held: list[Any] = field(default_factory=list)  # what the ids in the cache signature are of
    groups: AtomGroups | None = None
    groups_key: object = None
    sources: tuple[GroupSource, ...] = ()
    buffers: PlanBuffers = field(default_factory=PlanBuffers)  # for `sources`
    numbers: tuple[LayerMaps, list[int]] | None = None  # layer numbers of these layer maps
    points: tuple[dict[int, Any], list[AttachPoint]] | None = None  # of these layers


@dataclass(frozen=True)
class RTPForwardContext:
    """One pass of RTP-LLM's for ATOM's layers: plain attention models.

    Beside the reference's fields: `attn_metadata.rtp_groups` has each group's own slots, tables and state slots, and
    `gdn_metadata.non_spec_state_indices_in_tensor` the slots that states are read from.
    """

    gdn_metadata: Any
    attn_metadata: Any
    rtp_attn_inputs: Any
    rtp_seq_size_per_block: int
    rtp_kernel_seq_size_per_block: int
    kv_cache_data: dict[str, Any]
    state_indices_cache: dict[tuple[int, bool], torch.Tensor]
    layer_group_map: dict[int, int]
    context: Any
    num_tokens: int
    mla_layer_map: dict[int, Any]
    LayerMaps: ClassVar[TypeAlias] = LayerMaps
    profile: ClassVar[Profile] = PLAIN

    @staticmethod
    def collect_layer_maps(model: Any) -> LayerMaps:
        """Modules of a model by layer number: Gated DeltaNet, paged attention, sparse MLA (seed behaviour 15)."""
        return collect_layers(model, atom.atom_api())

    @staticmethod
    def state_indices_for_layer(
        *,
        attn_inputs: Any,
        is_prefill: bool,
        device: torch.device,
        seq_size_per_block: int,
        layer_num: int,
        state_indices_cache: dict[tuple[int, bool], torch.Tensor] | None = None,
        layer_group_map: dict[int, int] | None = None,
    ) -> torch.Tensor:
        """[B] int32 slots that a layer's states are written to. Those of the pass's own groups are computed with the
        pass and found in `state_indices_cache`; others are computed here and kept there."""
        number = (layer_group_map or {}).get(layer_num, 0)
        key = (number, bool(is_prefill))
        found = None if state_indices_cache is None else state_indices_cache.get(key)
        if found is None:
            found = state_slots_of_layer(attn_inputs, is_prefill, device, seq_size_per_block, number)
            if state_indices_cache is not None:
                state_indices_cache[key] = found
        return found

    @classmethod
    def build(
        cls,
        model: Any,
        runtime: Any,
        inputs: Any,
        positions: torch.Tensor,
        layer_maps: LayerMaps | None = None,
        cg_max_seq_len: int = 0,
        cg_bufs: Any = None,
        strict: bool | None = None,
    ) -> RTPForwardContext:
        """The context of a pass. positions: [T] of the new tokens. cg_max_seq_len: longest context of a captured pass.
        cg_bufs: kept for ATOM's readers; nothing here needs it. strict: raise at once for missing blocks; None: where
        looking costs no wait, in eager passes that are no warm-up.

        Raises `StepError` for what is missing or does not fit together, `BlockFaultError` for missing blocks.
        """
        api = atom.atom_api()
        host = read(inputs)
        if runtime.kv_cache is None:
            raise StepError("runtime.kv_cache", "none", "an initialized cache")
        if positions is None or positions.numel() == 0:
            raise StepError("positions", "none", "one for each new token")
        maps = layer_maps or collect_layers(model, api)
        kept = _kept_on(runtime)
        tensors = _tensors(kept, runtime, maps, api)
        groups = _groups(kept, runtime, maps, host)
        computed, captured = _compute(cls.profile, kept, inputs, host, positions, groups, cg_max_seq_len, strict)
        caches = state_caches(host, computed)
        gdn = gdn_metadata(host, computed, groups, api, caches) if maps[0] else None
        metadata = attention_metadata(
            host, computed, groups, cls.profile, api, cg_bufs, kept.buffers if captured else None
        )
        return cls(
            gdn_metadata=gdn,
            attn_metadata=metadata,
            rtp_attn_inputs=host.attn_inputs,
            rtp_seq_size_per_block=groups.block_size,
            rtp_kernel_seq_size_per_block=groups.kernel_block_size,
            kv_cache_data=tensors,
            state_indices_cache=caches["write"],
            layer_group_map=groups.layer_to_group,
            context=api.context(
                positions=positions, is_prefill=host.is_prefill, batch_size=host.num_rows, graph_bs=host.num_rows
            ),
            num_tokens=positions.numel(),
            mla_layer_map=maps[2] if cls.profile.latent_layers else _NO_LAYERS,
        )

    @classmethod
    @contextmanager
    def bind(
        cls,
        *,
        model: Any,
        runtime: Any,
        inputs: Any,
        positions: torch.Tensor,
        layer_maps: LayerMaps | None = None,
        cg_max_seq_len: int = 0,
        cg_bufs: Any = None,
        strict: bool | None = None,
    ) -> Iterator[None]:
        """`build`, set as ATOM's forward context inside the block. Nests; every exit restores what was there before, in
        reverse order (seed behaviour 20). Where ATOM keeps a context for each thread, so does this."""
        context = cls.build(model, runtime, inputs, positions, layer_maps, cg_max_seq_len, cg_bufs, strict)
        metadata = context.attn_metadata
        metadata.gdn_metadata = context.gdn_metadata
        metadata.rtp_attn_inputs = context.rtp_attn_inputs
        metadata.rtp_kernel_seq_size_per_block = context.rtp_kernel_seq_size_per_block
        metadata.rtp_seq_size_per_block = context.rtp_seq_size_per_block
        metadata.rtp_layer_group_map = context.layer_group_map
        api, attached = atom.atom_api(), Attached()
        before = api.cache_context.kv_cache_data
        try:
            points = _points(runtime, context.mla_layer_map)
            attached.attach(points, context.kv_cache_data, context.rtp_seq_size_per_block, api.fp8)
            with _ambient(api, context):
                yield
        finally:
            attached.restore()
            api.set_kv_cache_data(before if before is not None else {})


@dataclass(frozen=True)
class RTPForwardMLAContext(RTPForwardContext):
    """Sparse MLA models: a latent cache and an indexer, whose caches are attached to the layers."""

    profile: ClassVar[Profile] = SPARSE_MLA


@dataclass(frozen=True)
class RTPForwardQwen35HybridContext(RTPForwardContext):
    """Hybrids of Gated DeltaNet and full attention."""

    profile: ClassVar[Profile] = HYBRID


_NO_LAYERS: dict[int, Any] = {}


class _Bound(threading.local):
    """The contexts that this thread has bound, outermost first."""

    def __init__(self) -> None:
        self.stack: list[RTPForwardContext] = []


_bound = _Bound()
_lock = threading.Lock()


@contextmanager
def _ambient(api: atom.AtomApi, context: RTPForwardContext) -> Iterator[None]:
    """ATOM's forward context, the outer one again afterwards."""
    local_before = getattr(api.local, "ctx", None)
    _bound.stack.append(context)
    _set(api, context)
    try:
        yield
    finally:
        _bound.stack.pop()
        if _bound.stack:
            _set(api, _bound.stack[-1])
        else:
            api.reset_forward_context()
        if api.local is not None:
            api.local.ctx = local_before


def _set(api: atom.AtomApi, context: RTPForwardContext) -> None:
    with _lock:  # ATOM's setters go through a state that all threads share
        if api.local is not None:
            api.local.ctx = None
        api.set_kv_cache_data(context.kv_cache_data)
        api.set_forward_context(
            attn_metadata=context.attn_metadata,
            atom_config=api.current_config(),
            context=context.context,
            num_tokens=context.num_tokens,
        )
        if api.local is not None:
            api.local.ctx = api.get_forward_context()


def _compute(
    profile: Profile,
    kept: _Kept,
    inputs: Any,
    host: AtomPass,
    positions: torch.Tensor,
    groups: AtomGroups,
    max_context: int,
    strict: bool | None,
) -> tuple[Computed, bool]:
    budget = max(max_context, 1)
    if atom.capturing():
        return compute_captured(inputs, host, profile, groups, kept.buffers, max_context), True
    if positions.device.type == "cpu" and host.tables[0].device.type == "cpu":
        return compute_on_host(host, positions, profile, groups, strict, budget), False
    return compute_by_plan(inputs, host, positions.numel(), profile, groups, kept.buffers, budget), False


def _kept_on(runtime: Any) -> _Kept:
    kept: _Kept | None = getattr(runtime, "_stepbind_kept", None)
    if kept is None:
        kept = runtime._stepbind_kept = _Kept()
    return kept


def _tensors(kept: _Kept, runtime: Any, maps: LayerMaps, api: atom.AtomApi) -> dict[str, Any]:
    """Cache views, kept on the runtime under the reference's names (seed behaviour 18)."""
    if kept.numbers is None or kept.numbers[0] is not maps:
        kept.numbers = (maps, layer_numbers(maps))
    key, held = cache_key(runtime.kv_cache, kept.numbers[1])
    tensors: dict[str, Any] | None = getattr(runtime, "_rtp_kv_cache_data", None)
    if tensors is None or key != getattr(runtime, "_rtp_kv_cache_signature", None):
        tensors = cache_tensors(runtime.kv_cache, maps, api)
        runtime._rtp_kv_cache_data, runtime._rtp_kv_cache_signature = tensors, key
        kept.held, kept.groups = held, None
    return tensors


def _points(runtime: Any, latent: dict[int, Any]) -> list[AttachPoint]:
    kept = _kept_on(runtime)
    if kept.points is None or kept.points[0] is not latent:
        kept.points = (latent, attach_points(latent))
    return kept.points[1]


def _groups(kept: _Kept, runtime: Any, maps: LayerMaps, host: AtomPass) -> AtomGroups:
    """Groups, kept while the host's map, sizes and buffers are the same (seed behaviour 19: by content)."""
    numbers = _layer_numbers(runtime, host.layer_to_group)
    kv_cache = runtime.kv_cache
    sizes = (getattr(kv_cache, "seq_size_per_block", None), getattr(kv_cache, "kernel_seq_size_per_block", None))
    key = (numbers, sizes, host.tags, len(host.tables))
    if kept.groups is None or key != kept.groups_key:
        groups = atom_groups(kv_cache, maps, host, numbers)
        if kept.sources != groups.sources:
            kept.buffers, kept.sources = PlanBuffers(), groups.sources
        kept.groups, kept.groups_key = groups, key
        runtime._rtp_layer_group_map = groups.layer_to_group
    return kept.groups


def _layer_numbers(runtime: Any, tensor: torch.Tensor | None) -> tuple[int, ...]:
    if tensor is None:
        return ()
    if tensor.device.type == "cpu":
        numbers = tuple(tensor.tolist())
        runtime._rtp_layer_group_map_signature = numbers
        return numbers
    key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
    kept: tuple[Any, tuple[int, ...], torch.Tensor] | None = getattr(runtime, "_stepbind_layer_numbers", None)
    if kept is None or kept[0] != key:  # a device tensor is read once
        kept = runtime._stepbind_layer_numbers = (key, tuple(tensor.tolist()), tensor)
        runtime._rtp_layer_group_map_signature = kept[1]
    return kept[1]
