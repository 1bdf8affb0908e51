"""Everything rebuilt for each cache group in each step, with several device read-backs each. Guards: both fills compute
a step's shared values once, RtpBinding keeps groups, views and buffers between passes, the local host's rows copy
nothing where nothing changed. That nothing is read back, for any number of groups, is line 26's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepbind import CacheGroup, GroupKind, Phase, SamplingParams, build_plan, make_arena, make_step
from stepbind.hosts.local.request import Sequence
from stepbind.hosts.local.rows import DecodeRows
from stepbind.hosts.rtp_llm import RtpBinding, binding
from stepbind.layers import discover_layers
from stepbind.plan import Arena, fill_kernels
from stepbind.step import Step
from tests.fill_checks import on_device
from tests.hosts.rtp_double.caches import kv_cache
from tests.hosts.rtp_double.host import allocate
from tests.hosts.rtp_double.inputs import GENERATIONS, Layout, ModelInputs, Row, model_inputs
from tests.zoo.harness import FILLS, hybrid
from tests.zoo.valueless import count_launches

MANY = (1, 3, 8)


def groups_of(count: int) -> tuple[CacheGroup, ...]:
    kinds = (GroupKind.ATTENTION, GroupKind.STATE)
    return tuple(CacheGroup(f"group{i}", kinds[i % 2], (i,), 8, 8 // (1 + i % 2), 50) for i in range(count))


def step_of(count: int, phase: Phase, *, device_lengths: bool = True) -> Step:
    groups = groups_of(count)
    query = 1 if phase is Phase.DECODE else 5
    tables = {group.name: torch.arange(1, 25, dtype=torch.int32).reshape(3, 8) for group in groups}
    step = make_step(groups, phase, [query] * 3, [4, 9, 17], tables, padded_rows=4, padded_tokens=20)
    return on_device(step, "cpu", device_lengths=device_lengths)


def arena_of(step: Step) -> Arena:
    return make_arena(step.groups, max_rows=4, max_tokens=20, max_context=64)


class Writes(TorchDispatchMode):
    """Counts the operations that write to some tensors' memory; without any, all that write to what they are given."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.count = 0
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            given = kwargs.get(argument.name, args[number] if number < len(args) else None)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, torch.Tensor):
                self.count += not self._storages or given.untyped_storage().data_ptr() in self._storages
        return func(*args, **kwargs)


@pytest.mark.parametrize("phase", list(Phase))
def test_shared_values_are_written_once_however_many_groups_there_are(phase: Phase) -> None:
    counts = []
    for count in MANY:
        step = step_of(count, phase)
        arena = arena_of(step)
        with Writes(*vars(arena.shared).values()) as writes:
            build_plan(step, arena, triton=False)
        counts.append(writes.count)
    assert counts[0] > 0
    assert counts == [counts[0]] * len(MANY)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("device_lengths", [True, False], ids=["device lengths", "host lengths"])
def test_the_gpus_fill_is_one_launch_and_at_most_one_copy_however_many_groups_there_are(
    phase: Phase, device_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = count_launches(monkeypatch)
    for count in MANY:
        step = step_of(count, phase, device_lengths=device_lengths)
        arena = arena_of(step)
        build_plan(step, arena, triton=True, strict=False)
        launches.clear()
        with Writes() as writes:
            build_plan(step, arena, triton=True, strict=False)
        assert len(launches) == 1
        assert writes.count == (0 if device_lengths else 1)


@pytest.mark.skipif(True not in FILLS, reason="needs Triton's interpreter")
def test_the_gpus_fill_stores_shared_values_for_the_first_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[str] = []

    def counted(name: str) -> Any:
        real = getattr(fill_kernels, name)

        def store(*arguments: Any, **options: Any) -> Any:
            stores.append(name)
            return real(*arguments, **options)

        return store

    for name in ("store_rows", "store_tokens"):
        monkeypatch.setattr(fill_kernels, name, counted(name))
    counts = []
    for count in MANY:
        step = step_of(count, Phase.DECODE)
        build_plan(step, arena_of(step), triton=True)
        counts.append(len(stores))
        stores.clear()
    assert counts[0] > 0
    assert counts == [counts[0]] * len(MANY)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_a_pass_of_rtp_finds_groups_views_and_buffers_as_the_last_one_left_them(
    generation: str, is_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pass costs as many operations with eight groups as with two, and none of them makes groups again."""
    made: list[int] = []
    real = binding.group_sources

    def group_sources(*arguments: Any) -> Any:
        made.append(1)
        return real(*arguments)

    monkeypatch.setattr(binding, "group_sources", group_sources)
    counts = []
    for layers in (2, 8):
        host, layout = rtp_host(layers, generation)
        rows = [Row([1], 9, [[5, 6]] * layers), Row([1], 3, [[7, 8]] * layers)]
        first = pass_on(host, model_inputs(layout, Phase.DECODE, rows), is_graph)
        inputs = model_inputs(layout, Phase.DECODE, rows)
        made.clear()
        with Operations() as operations:
            again = pass_on(host, inputs, is_graph)
        counts.append(operations.count)
        assert made == []
        assert again[0] is first[0]
        assert again[1] == first[1]
    assert counts[0] == counts[1]


class Operations(TorchDispatchMode):
    """Counts all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def rtp_host(layers: int, generation: str) -> tuple[RtpBinding, Layout]:
    """A hybrid with a group for each layer."""
    model = hybrid(layers)
    kinds = (GroupKind.STATE, GroupKind.ATTENTION)
    groups = tuple(CacheGroup(f"group{i}", kinds[i % 2], (i,), 8, 4, 24) for i in range(layers))
    host = RtpBinding(model, max_rows=4, max_context=16)
    host.initialize(kv_cache(generation, groups, allocate(discover_layers(model), groups)))
    return host, Layout(groups, generation, layers)


def pass_on(host: RtpBinding, inputs: ModelInputs, is_graph: bool) -> tuple[Any, list[int]]:
    """The groups of a pass, and where its values and views are."""
    step, caches = host.read(inputs, is_graph=is_graph)
    arena = host._arena_of(step, is_graph=is_graph)
    views = [id(caches[layer.index]) for layer in host.layers]
    return step.groups, [*views, caches.generation, id(arena), arena.shared.query_start.data_ptr()]


def test_rows_of_the_local_host_copy_nothing_while_nobody_begins_a_block() -> None:
    groups = groups_of(8)
    rows = DecodeRows(groups, max_rows=4, max_context=64, device=torch.device("cpu"))
    sequences = [Sequence(number, 4, [1] * 40, SamplingParams()) for number in range(3)]
    for sequence, computed in zip(sequences, (9, 10, 11), strict=True):
        sequence.computed = computed
        sequence.tables = [list(range(1, 9)) for _ in groups]
    rows.set(sequences)
    copied = []
    for _ in range(8):
        with Writes(rows.query_len) as writes:
            rows.go_on()
        copied.append(writes.count)
    # The rows stand at 9, 10 and 11, and begin blocks at 16: after 5, 6 and 7 steps.
    assert copied == [0, 0, 0, 0, 1, 1, 1, 0]
