"""The three context classes, with the public surface of ATOM's own bridge."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, TypeAlias

import torch

from stepbind.errors import StepError
from stepbind.targets.atom import api as atom
from stepbind.targets.atom.assemble import Made, make
from stepbind.targets.atom.computed import Computed
from stepbind.targets.atom.groups import AtomGroups
from stepbind.targets.atom.kept import (
    Kept,
    kept_groups,
    kept_numbers,
    kept_on,
    update_groups,
    update_points,
    update_views,
)
from stepbind.targets.atom.known import DecodeAgain
from stepbind.targets.atom.memory import Attached, LayerMaps, collect_layers
from stepbind.targets.atom.metadata import HYBRID, PLAIN, SPARSE_MLA, Profile
from stepbind.targets.atom.passes import PlanBuffers, compute_by_plan, compute_captured, compute_on_host
from stepbind.targets.atom.prototypes import make_again, prototypes_of
from stepbind.targets.atom.read import AtomPass, read
from stepbind.targets.atom.states import state_slots_of_layer
from stepbind.targets.atom.usual import UsualInputs, usual_inputs, usual_pass
from stepbind.targets.atom.usual_gpu import usual_on_gpu


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
        number = layer_group_map.get(layer_num, 0) if layer_group_map else 0
        if state_indices_cache is not None:
            try:
                return state_indices_cache[number, is_prefill]
            except KeyError:
                pass
        found = state_slots_of_layer(attn_inputs, is_prefill, device, seq_size_per_block, number)
        if state_indices_cache is not None:
            state_indices_cache[number, bool(is_prefill)] = found
        return found

    @staticmethod
    def check_faults(runtime: Any) -> None:
        """Raise `BlockFaultError` for missing blocks of the runtime's passes on a GPU, captured ones and those with
        strict=False too, since they were last raised. Waits for the GPU: call it where waiting is free, and behind the
        last pass."""
        kept_on(runtime).buffers.check()

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
        cg_bufs: kept for ATOM's readers; nothing here needs it. strict: raise at once for missing blocks, which on a
        GPU waits for it; False: do not raise. None, in eager passes that are no warm-up: raise at once on the CPU, and
        on a GPU in a later pass, as soon as the host can see it without waiting (`check_faults` looks at any time).

        On a GPU the context's tensors hold until the runtime's next pass, but for passes inside of its `bind`.

        Raises `StepError` for what is missing or does not fit together, `BlockFaultError` for missing blocks.
        """
        api = atom.atom_api()
        if runtime.kv_cache is None:
            raise StepError("runtime.kv_cache", "none", "an initialized cache")
        if positions is None or positions.numel() == 0:
            raise StepError("positions", "none", "one for each new token")
        host: AtomPass | UsualInputs
        computed: Computed | DecodeAgain
        maps = layer_maps or collect_layers(model, api)
        kept = kept_on(runtime)
        tensors = update_views(kept, runtime, maps, api)
        usual = _usual(cls.profile, kept, runtime, inputs, positions, strict)
        captured = False
        if usual is not None:
            host, groups, computed = usual
        else:
            host = read(inputs)
            groups = update_groups(kept, runtime, maps, host)
            level = _bound.level_of(runtime)
            computed, captured = _compute(
                cls.profile, kept, inputs, host, positions, groups, cg_max_seq_len, strict, level
            )
        made = _made(
            cls.profile, host, computed, groups, api, cg_bufs, kept.buffers if captured else None, bool(maps[0])
        )
        context = object.__new__(cls)
        fields = {
            "gdn_metadata": made.gdn,
            "attn_metadata": made.metadata,
            "rtp_attn_inputs": host.attn_inputs,
            "rtp_seq_size_per_block": groups.block_size,
            "rtp_kernel_seq_size_per_block": groups.kernel_block_size,
            "kv_cache_data": tensors,
            "state_indices_cache": made.state_write,
            "layer_group_map": groups.layer_to_group,
            "context": api.context(
                positions=positions,
                is_prefill=host.is_prefill,
                batch_size=made.num_rows,
                graph_bs=made.num_rows,
            ),
            "num_tokens": positions.numel(),
            "mla_layer_map": maps[2] if cls.profile.latent_layers else _NO_LAYERS,
        }
        # At once, as every pass makes one: a frozen dataclass sets its fields one by one.
        object.__setattr__(context, "__dict__", fields)
        return context

    @classmethod
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
    ) -> AbstractContextManager[None]:
        """`build`, set as ATOM's forward context inside the block. Nests; every exit restores what was there before, in
        reverse order (seed behaviour 20). Where ATOM keeps a context for each thread, so does this."""
        return _Binding(cls, runtime, (model, runtime, inputs, positions, layer_maps, cg_max_seq_len, cg_bufs, strict))


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
    """The contexts that this thread has bound, outermost first, each with its runtime."""

    def __init__(self) -> None:
        self.stack: list[tuple[RTPForwardContext, Any]] = []

    def level_of(self, runtime: Any) -> int:
        """How many of them are the runtime's."""
        return sum([of is runtime for _, of in self.stack]) if self.stack else 0


_bound = _Bound()
_lock = threading.Lock()


class _Binding(AbstractContextManager[None]):
    """One `with` block around a forward."""

    def __init__(self, cls: type[RTPForwardContext], runtime: Any, arguments: tuple[Any, ...]) -> None:
        self._cls, self._runtime, self._arguments = cls, runtime, arguments

    def __enter__(self) -> None:
        context = self._cls.build(*self._arguments)
        self._api = api = atom.atom_api()
        latent, self._attached = context.mla_layer_map, None
        if latent:
            points = update_points(kept_on(self._runtime), latent, context.rtp_seq_size_per_block, api)
            self._attached = Attached(points)
        self._caches_before = api.cache_context.kv_cache_data
        self._local_before = getattr(api.local, "ctx", None)
        _bound.stack.append((context, self._runtime))
        try:
            if self._attached is not None:
                self._attached.attach()
            _set(api, context)
        except BaseException:
            self._restore()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        api = self._api
        _bound.stack.pop()
        try:
            if _bound.stack:
                _set(api, _bound.stack[-1][0])
            else:
                api.reset_forward_context()
            if api.local is not None:
                api.local.ctx = self._local_before
        finally:
            if self._attached is not None:
                self._attached.restore()
            api.set_kv_cache_data(self._caches_before if self._caches_before is not None else {})


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


def is_on_host(positions: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether a pass is computed from host values. Tests say no, to take a GPU's way on the CPU."""
    return positions.is_cpu and table.is_cpu


def _usual(
    profile: Profile, kept: Kept, runtime: Any, inputs: Any, positions: torch.Tensor, strict: bool | None
) -> tuple[UsualInputs, AtomGroups, Computed | DecodeAgain] | None:
    """A pass of the usual kind; None for others, good or bad."""
    if atom.capturing(on_gpu=positions.is_cuda):
        return None
    given = usual_inputs(inputs, physical=profile.physical_table)
    numbers = None if given is None else kept_numbers(kept, given.layer_to_group)
    if given is None or numbers is None:
        return None
    groups = kept_groups(kept, runtime.kv_cache, numbers, given.tags, len(given.tables))
    if groups is None:
        return None
    computed: Computed | DecodeAgain | None
    if is_on_host(positions, given.tables[0]):
        computed = usual_pass(given, inputs, positions, profile, groups)
    else:
        level = _bound.level_of(runtime)
        computed = usual_on_gpu(given, positions, profile, groups, kept.buffers, strict, level)
    return None if computed is None else (given, groups, computed)


def _made(
    profile: Profile,
    host: AtomPass | UsualInputs,
    found: Computed | DecodeAgain,
    groups: AtomGroups,
    api: atom.AtomApi,
    cg_bufs: Any,
    captured: PlanBuffers | None,
    has_gdn: bool,
) -> Made:
    """ATOM's objects; those of a decode of a known kind after the ones that were made first."""
    if not isinstance(found, DecodeAgain):
        return make(host, found, groups, profile, api, cg_bufs, captured, has_gdn)
    of = found.known.prototypes
    if of is not None and of.api is api and of.profile is profile and (of.gdn is not None) == has_gdn:
        return make_again(found, of, cg_bufs)
    made = make(host, found.computed(), groups, profile, api, cg_bufs, None, has_gdn)
    found.known.prototypes = prototypes_of(made, profile, api)
    return made


def _compute(
    profile: Profile,
    kept: Kept,
    inputs: Any,
    host: AtomPass,
    positions: torch.Tensor,
    groups: AtomGroups,
    max_context: int,
    strict: bool | None,
    level: int,
) -> tuple[Computed, bool]:
    budget = max(max_context, 1)
    on_host = is_on_host(positions, host.tables[0])
    # The warm-up before a capture takes the captured pass's way: what that needs must be there when the capture begins.
    is_warm_up = host.graph_flag and not host.is_prefill and not on_host and max_context > 0
    if is_warm_up or atom.capturing():
        return compute_captured(inputs, host, profile, groups, kept.buffers, max_context), True
    if on_host:
        return compute_on_host(host, positions, profile, groups, strict, budget), False
    tokens = positions.numel()
    return compute_by_plan(inputs, host, tokens, profile, groups, kept.buffers, budget, strict, level), False
