"""Passes of one binding inside of each other, and faults that a GPU raises later."""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from stepbind.context import Context
from stepbind.errors import BlockFaultError
from stepbind.hosts.rtp_llm import binding as rtp_binding
from stepbind.plan import PagedPlan, build_plan
from stepbind.step import Phase
from tests.hosts.rtp_double.by_hand import Host, each
from tests.hosts.rtp_double.inputs import GENERATIONS, ModelInputs, Row, int32
from tests.zoo.harness import tokens

NO_ROW = SimpleNamespace(sequence_lengths=int32([0]))


@pytest.fixture(params=GENERATIONS)
def host(request: pytest.FixtureRequest) -> Host:
    return Host(request.param)


def prefill(host: Host) -> ModelInputs:
    return host.inputs(Phase.PREFILL, [Row(tokens(9), 0, [[5, 6], [1, 2]]), Row(tokens(3), 2, [[7], [3]])])


def decode(host: Host, *, host_lengths: bool = True, hole: bool = False) -> ModelInputs:
    inputs = host.inputs(Phase.DECODE, [Row([1], 4, [[8], [4]]), Row([2], 8, [[9, 10], [5, 0 if hole else 6]])])
    if not host_lengths:
        for attention in each(inputs):
            attention.input_lengths = attention.prefix_lengths = attention.sequence_lengths = None
    return inputs


def values_of(context: Context) -> list[Any]:
    plan, found = context.plan, []
    for values in vars(plan.shared).values():
        found.append(values.tolist())
    for group in plan.groups:
        tensors = (group.slot, group.block_table) if isinstance(group, PagedPlan) else (group.state_read,)
        found += [values.tolist() for values in tensors]
    return found


@pytest.mark.parametrize("host_lengths", [True, False])
def test_nested_passes_leave_the_outer_ones_values_alone(host: Host, host_lengths: bool) -> None:
    passes = [decode(host, host_lengths=host_lengths), prefill(host), decode(host, host_lengths=host_lengths)]
    for _ in range(2):
        for outer, inner in pairwise(passes):
            with host.binding.bind(outer) as context:
                before = values_of(context)
                with host.binding.bind(inner) as other:
                    assert values_of(other) != before
                assert values_of(context) == before
    assert len(host.binding._eager_arenas._arenas) == 2


def test_a_failed_bind_does_not_count_as_a_level(host: Host) -> None:
    with pytest.raises(ZeroDivisionError), host.binding.bind(prefill(host)):
        raise ZeroDivisionError
    with pytest.raises(BlockFaultError), host.binding.bind(decode(host, hole=True)):
        raise AssertionError("bound")
    with host.binding.bind(prefill(host)):
        assert len(host.binding._eager_arenas._arenas) == 1


def test_a_pass_on_bounds_leaves_the_graphs_values_alone(host: Host) -> None:
    graph = host.inputs(Phase.DECODE, [Row([1], 5, [[11, 12], [7, 8]]), Row([2], 6, [[13], [9, 10]])])
    with host.binding.bind(graph, is_graph=True) as context:
        before = values_of(context)
        with host.binding.bind(decode(host, host_lengths=False)):
            pass
        assert values_of(context) == before


def test_threads_do_not_overwrite_each_others_values(host: Host) -> None:
    def run() -> None:
        with host.binding.bind(prefill(host)):
            pass

    run()
    with host.binding.bind(decode(host)) as context:
        before = values_of(context)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert values_of(context) == before


@pytest.fixture
def late(host: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host whose passes count their faults and raise none, as on a GPU."""

    def counting(*arguments: Any, strict: bool | None = None) -> Any:
        return build_plan(*arguments, strict=False)

    monkeypatch.setattr(rtp_binding, "build_plan", counting)
    return host


MISSING = r"1 in group '\w+' \(first in row 1\)"


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("host_lengths", [False, True])
def test_faults_are_raised_once_by_a_later_pass_or_replay(late: Host, is_graph: bool, host_lengths: bool) -> None:
    binding, hole = late.binding, decode(late, host_lengths=host_lengths, hole=True)
    later_pass, replay = partial(late.run, prefill(late)), partial(binding.check_replay, NO_ROW)
    for later in (later_pass, replay, binding.check_faults, partial(binding.initialize, late.cache)):
        with binding.bind(hole, is_graph=is_graph):
            pass
        with pytest.raises(BlockFaultError, match=MISSING):
            later()
        later()


def test_faults_are_raised_before_their_groups_are_forgotten(late: Host) -> None:
    with late.binding.bind(decode(late, hole=True)):
        pass
    late.binding._sources_key = None  # other groups
    arenas = late.binding._eager_arenas
    assert arenas.fault_counts is not None
    arenas.fault_counts.seen[0] = 0  # as before a GPU has come that far
    with pytest.raises(BlockFaultError, match=MISSING):
        late.run(prefill(late))
    late.run(prefill(late))
    assert late.binding._eager_arenas is not arenas
