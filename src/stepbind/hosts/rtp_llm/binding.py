"""One model on RTP-LLM's cache: passes in, bound contexts out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stepbind.bind import bind
from stepbind.caches import BufferKey, Caches
from stepbind.context import Context
from stepbind.errors import StepError
from stepbind.groups import GroupKind
from stepbind.hosts.local.memory import allocate_buffers
from stepbind.hosts.rtp_llm.groups import GroupSource, group_sources, spec_on
from stepbind.hosts.rtp_llm.reader import HostMemory, HostPass, longest_context, read_memory, read_pass
from stepbind.hosts.rtp_llm.steps import Scratch, StepOptions, step_of
from stepbind.layers import Layer, discover_layers, group_layers
from stepbind.plan import Arena, ArenaPool, build_plan, make_arena
from stepbind.step import Lengths, Phase, Step, make_step


class RtpBinding:
    """Reads RTP's passes and binds them around a transformers model whose layers work on RTP's cache.

    max_rows: of a pass. max_context: tokens of the longest row. Captured passes work in buffers that are made with the
    first of them and stay where they are until the cache itself is another; the buffers of eager passes grow.

    Missing blocks of an eager pass are raised at once on the CPU. On a GPU a later pass or replay raises them, as soon
    as the host can see them without waiting, and those of replays with them; `check_faults` looks at any time.
    Raises `UnknownModelError` for a model of no known family.
    """

    def __init__(self, model: Any, *, max_rows: int, max_context: int, options: StepOptions | None = None) -> None:
        self.model = model
        self.layers = discover_layers(model)
        self.device: torch.device = model.device
        self.max_rows, self.max_context = max_rows, max_context
        self.options = options or StepOptions()
        self._bound = _Bound()
        self._eager_arenas = ArenaPool(max_rows, max_context)
        self.initialize(None)

    def initialize(self, kv_cache: Any | None) -> None:
        """Work on this cache from now on (None: on none, for passes before there is one). What was made for another
        cache is forgotten; graphs captured on it are no longer good. Raises `BlockFaultError`, and changes nothing, for
        faults of passes on the other cache that have not been raised."""
        self._forget_arenas()
        self.kv_cache = kv_cache
        self._sources: tuple[GroupSource, ...] = ()
        self._sources_key: object = None
        self._layer_to_group = _LayerToGroup()
        self._caches = Caches()
        self._scratch = Scratch.of(self.max_rows, self.device)  # read by a pass's fill, and by nobody behind it

    @contextmanager
    def bind(self, inputs: Any, *, is_graph: bool = False) -> Iterator[Context]:
        """The context of a pass around a forward of the model. Eager passes nest: each has buffers of its own. Raises
        `StepError` for what does not fit together, and `BlockFaultError` for missing blocks, of earlier passes too;
        nothing is bound then."""
        if self.kv_cache is None:
            step, caches = self._without_cache(inputs)
        else:
            host = read_pass(inputs, is_graph=is_graph)
            is_graph = host.is_graph
            step, caches = self._step_and_caches(host)
        if not is_graph:
            self._eager_arenas.raise_seen()
        # A captured pass cannot look at its faults.
        plan = build_plan(step, self._arena_of(step, is_graph=is_graph), strict=False if is_graph else None)
        with bind(plan, caches, self.model) as context, self._bound.one_more():
            yield context

    def read(self, inputs: Any, *, is_graph: bool = False) -> tuple[Step, Caches]:
        """A pass and the views of the cache that it works on."""
        return self._step_and_caches(read_pass(inputs, is_graph=is_graph))

    def _step_and_caches(self, host: HostPass) -> tuple[Step, Caches]:
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
        """Before a replay: raise `StepError` for a row longer than captured passes take, by the host's lengths, and
        `BlockFaultError` for missing blocks of earlier passes and replays that the host has seen. Waits for nothing."""
        self._eager_arenas.raise_seen()
        longest = longest_context(attention_inputs)
        if longest is not None and longest > self.max_context:
            raise StepError("context of a replayed row", longest, f"at most {self.max_context} tokens")

    def check_faults(self) -> None:
        """Raise `BlockFaultError` for missing blocks of passes and replays since they were last raised. Waits for the
        GPU: call it where waiting is free, and behind the last pass."""
        self._eager_arenas.check("earlier passes")

    def _update_groups(self, host: HostPass, memory: HostMemory) -> None:
        tags = tuple(table.tag for table in host.tables)
        numbers = self._layer_to_group.read(host.layer_to_group) if len(tags) > 1 else None
        blocks = tuple(buffer.shape[0] for buffer in memory.buffers.values())
        named = memory.tag_of_layer and tuple(memory.tag_of_layer.items())
        sizes = memory.default_sizes if memory.sizes is None else tuple(memory.sizes.items())
        key = (tags, numbers, blocks, named, sizes)
        if key == self._sources_key:
            return
        sources = group_sources(self.layers, memory, tags, numbers)
        self._forget_arenas()
        self._sources, self._sources_key = sources, key

    def _forget_arenas(self) -> None:
        """Make arenas for other groups. Raises, and forgets nothing, where faults counted in the old ones have not been
        raised; this once it waits for that."""
        self.check_faults()
        self._graph_arenas: dict[int, Arena] = {}  # by tokens a row
        self._eager_arenas = ArenaPool(self.max_rows, self.max_context)

    def _arena_of(self, step: Step, *, is_graph: bool) -> Arena:
        """All of them count faults in one place."""
        each, pool = step.max_query, self._eager_arenas
        if not is_graph:
            return pool.arena_for(step, self._bound.level)
        if each not in self._graph_arenas:
            arena = self._graph_arenas[each] = make_arena(
                step.groups,
                max_rows=self.max_rows,
                max_tokens=self.max_rows * each,
                max_context=self.max_context,
                device=self.device,
                fault_counts=pool.fault_counts,
            )
            pool.fault_counts = arena.fault_counts
        return self._graph_arenas[each]

    def _without_cache(self, inputs: Any) -> tuple[Step, Caches]:
        """A dummy step for a pass before there is a cache: it writes nothing, and its attention gives zeros."""
        tokens = _num_tokens(inputs)
        blocks = dict.fromkeys(GroupKind, 2)
        groups = group_layers(self.layers, block_size=1, kernel_block_size=1, num_blocks=blocks)
        caches = Caches.of(groups, _specs(self.layers), allocate_buffers(self.layers, groups, self.device))
        tables = {group.name: torch.zeros(1, 1, dtype=torch.int32, device=self.device) for group in groups}
        step = make_step(groups, Phase.PREFILL, Lengths.of([0]), Lengths.of([0]), tables, padded_tokens=tokens)
        return step, caches


class _Bound(threading.local):
    """How many of a binding's passes this thread has bound."""

    def __init__(self) -> None:
        self.level = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        self.level += 1
        try:
            yield
        finally:
            self.level -= 1


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
