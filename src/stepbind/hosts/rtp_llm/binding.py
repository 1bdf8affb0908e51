"""One model on RTP-LLM's cache: passes in, bound contexts out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepbind.bind import bind
from stepbind.caches import BufferKey, Caches
from stepbind.context import Context
from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.hosts.local.memory import allocate_buffers
from stepbind.hosts.rtp_llm.groups import GroupSource, group_sources, spec_on
from stepbind.hosts.rtp_llm.reader import HostMemory, HostPass, longest_context, read_memory, read_pass
from stepbind.hosts.rtp_llm.steps import Scratch, StepOptions, step_of
from stepbind.layers import Layer, discover_layers, group_layers
from stepbind.plan import Arena, build_plan, make_arena
from stepbind.step import Lengths, Phase, Step, make_step


class RtpBinding:
    """Reads RTP's passes and binds them around a transformers model whose layers work on RTP's cache.

    max_rows: of a pass. max_context: tokens of the longest row. Captured passes work in buffers that are made with the
    first of them and stay where they are until the cache itself is another; the buffers of eager passes grow.
    Raises `UnknownModelError` for a model of no known family.
    """

    def __init__(self, model: Any, *, max_rows: int, max_context: int, options: StepOptions | None = None) -> None:
        self.model = model
        self.layers = discover_layers(model)
        self.device: torch.device = model.device
        self.max_rows, self.max_context = max_rows, max_context
        self.options = options or StepOptions()
        self.initialize(None)

    def initialize(self, kv_cache: Any | None) -> None:
        """Work on this cache from now on (None: on none, for passes before there is one). What was made for another
        cache is forgotten; graphs captured on it are no longer good."""
        self.kv_cache = kv_cache
        self._sources: tuple[GroupSource, ...] = ()
        self._sources_key: object = None
        self._layer_to_group = _LayerToGroup()
        self._caches = Caches()
        self._graph_arenas: dict[int, Arena] = {}  # by tokens a row
        self._eager_arena: Arena | None = None
        self._scratch = Scratch.of(self.max_rows, self.device)

    @contextmanager
    def bind(self, inputs: Any, *, is_graph: bool = False) -> Iterator[Context]:
        """The context of a pass around a forward of the model. Raises `StepError` for what does not fit together;
        nothing is bound then."""
        step, caches = self._without_cache(inputs) if self.kv_cache is None else self.read(inputs, is_graph=is_graph)
        arena = self._arena_of(step, is_graph=step.lengths_are_bounds)
        # A captured pass cannot look at its faults, and neither can one whose lengths are bounds.
        plan = build_plan(step, arena, strict=False if step.lengths_are_bounds else None)
        with bind(plan, caches, self.model) as context:
            yield context

    def read(self, inputs: Any, *, is_graph: bool = False) -> tuple[Step, Caches]:
        """A pass and the views of the cache that it works on."""
        host = read_pass(inputs, is_graph=is_graph)
        memory = read_memory(self.kv_cache, [layer.index for layer in self.layers])
        self._update_groups(host, memory)
        specs = {layer.index: spec_on(memory.buffers[layer.index], layer) for layer in self.layers}
        self._caches.update([source.group for source in self._sources], specs, memory.buffers)
        if host.num_rows > self.max_rows:
            raise StepError("attention_inputs.input_lengths", f"{host.num_rows} rows", f"at most {self.max_rows}")
        return step_of(host, self._sources, self._scratch, self.max_context, self.options), self._caches

    def prepare_capture(self, inputs: Any) -> None:
        """Make all that a captured pass works in, before the capture, by a fill of the plan on the same inputs."""
        if self.kv_cache is not None:
            step, _ = self.read(inputs, is_graph=True)
            build_plan(step, self._arena_of(step, is_graph=True), strict=False)

    def check_replay(self, attention_inputs: Any) -> None:
        """Before a replay: raise `StepError` for a row longer than captured passes take, by the host's lengths."""
        longest = longest_context(attention_inputs)
        if longest is not None and longest > self.max_context:
            raise StepError("context of a replayed row", longest, f"at most {self.max_context} tokens")

    def _update_groups(self, host: HostPass, memory: HostMemory) -> None:
        tags = tuple(table.tag for table in host.tables)
        numbers = self._layer_to_group.read(host.layer_to_group) if len(tags) > 1 else None
        blocks = tuple(buffer.shape[0] for buffer in memory.buffers.values())
        named = memory.tag_of_layer and tuple(memory.tag_of_layer.items())
        sizes = memory.default_sizes if memory.sizes is None else tuple(memory.sizes.items())
        key = (tags, numbers, blocks, named, sizes)
        if key == self._sources_key:
            return
        self._sources = group_sources(self.layers, memory, tags, numbers)
        self._sources_key = key
        self._graph_arenas = {}
        self._eager_arena = None

    def _arena_of(self, step: Step, *, is_graph: bool) -> Arena:
        if is_graph:
            each = step.max_query
            if each not in self._graph_arenas:
                self._graph_arenas[each] = self._make_arena(step.groups, self.max_rows * each, self.max_context)
            return self._graph_arenas[each]
        arena = self._eager_arena
        if (
            arena is None
            or arena.cache_groups != step.groups
            or arena.max_tokens < step.padded_tokens
            or arena.max_context < step.max_context
        ):
            tokens = max(step.padded_tokens, 2 * arena.max_tokens if arena else 1)
            arena = self._eager_arena = self._make_arena(step.groups, tokens, max(step.max_context, self.max_context))
        return arena

    def _make_arena(self, groups: tuple[CacheGroup, ...], max_tokens: int, max_context: int) -> Arena:
        return make_arena(
            groups, max_rows=self.max_rows, max_tokens=max_tokens, max_context=max_context, device=self.device
        )

    def _without_cache(self, inputs: Any) -> tuple[Step, Caches]:
        """A dummy step for a pass before there is a cache: it writes nothing, and its attention gives zeros."""
        tokens = _num_tokens(inputs)
        blocks = dict.fromkeys(GroupKind, 2)
        groups = group_layers(self.layers, block_size=1, kernel_block_size=1, num_blocks=blocks)
        caches = Caches.of(groups, _specs(self.layers), allocate_buffers(self.layers, groups, self.device))
        tables = {group.name: torch.zeros(1, 1, dtype=torch.int32, device=self.device) for group in groups}
        step = make_step(groups, Phase.PREFILL, Lengths.of([0]), Lengths.of([0]), tables, padded_tokens=tokens)
        return step, caches


class _LayerToGroup:
    """The host's layer -> group tensor as numbers: by content where it is on the host, which costs nothing; one on a
    device is read when it is first seen, and again when the cache is another."""

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None  # held, so that its address is nobody else's
        self._key: BufferKey | None = None
        self._numbers: tuple[int, ...] = ()

    def read(self, tensor: torch.Tensor | None) -> tuple[int, ...] | None:
        if tensor is None:
            return None
        key = BufferKey.of(tensor)
        if tensor.device.type == "cpu" or key != self._key:
            self._numbers, self._key, self._kept = tuple(tensor.tolist()), key, tensor
        return self._numbers


def _num_tokens(inputs: Any) -> int:
    ids = inputs.input_ids
    return int(ids.numel()) if ids is not None and ids.numel() else int(inputs.input_hiddens.shape[0])


def _specs(layers: tuple[Layer, ...]) -> dict[int, Any]:
    return {layer.index: layer.spec for layer in layers}
