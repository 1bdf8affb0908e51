"""Passes through the plan, as on a GPU, here on the CPU: nested ones leave each other alone, and no fault is lost."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from stepbind.errors import BlockFaultError
from stepbind.plan import build_plan
from stepbind.targets.atom import context as atom_context
from stepbind.targets.atom import passes, usual_gpu
from stepbind.targets.atom.kept import kept_on
from tests.targets.atom_double.case import HYBRID, PLAIN, Case, capture, decode, every_class, prefill
from tests.targets.atom_double.modules import Ambient, atom_installed

GOOD = [[4, 0, 0], [7, 9, 0], [2, 3, 5]]
HOLE = [[4, 0, 0], [7, -1, 0], [2, 3, 5]]  # token 8 of row 1 has no block


@pytest.fixture(autouse=True, params=["torch", "triton"])
def ambient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ambient]:
    """By torch's fill, and by the kernel in Triton's interpreter, which passes of a known kind need."""
    monkeypatch.setattr(atom_context, "is_on_host", lambda positions, table: False)
    if request.param == "triton":
        if torch.cuda.is_available():
            pytest.skip("one process has either Triton's interpreter or a GPU")
        for module in (passes, usual_gpu):
            monkeypatch.setattr(module, "build_plan", partial(build_plan, triton=True))
    with atom_installed() as state:
        yield state


def on_runtime_of(case: Case, other: Case) -> Case:
    other.model, other.runtime = case.model, case.runtime
    return other


def tensors_in(metadata: Any) -> dict[str, Any]:
    """All of a pass's own tensors, by name."""
    plugin = metadata.plugin_metadata
    found = {
        "slot_mapping": metadata.slot_mapping,
        "context_lens": metadata.context_lens,
        "block_tables": metadata.block_tables,
        "start": plugin.query_start_loc,
    }
    for name in ("req_id_per_token", "cu_seqlen_ks", "cu_seqlen_ke"):
        found[name] = getattr(plugin, name, getattr(metadata, name, None))
    for group in metadata.rtp_groups:
        for name in ("slot_mapping", "state_read", "state_write"):
            found[f"{group.number} {name}"] = getattr(group, name)
    if metadata.gdn_metadata is not None:
        found["has_prior"] = metadata.gdn_metadata.has_initial_state
    return {name: value.tolist() for name, value in found.items() if value is not None}


@every_class
@pytest.mark.parametrize(("outer", "inner"), [(decode, prefill), (prefill, decode), (prefill, prefill)])
def test_nested_passes_of_a_runtime_leave_the_outer_ones_values_alone(
    cls: Any, outer: Callable[..., Case], inner: Callable[..., Case], ambient: Ambient
) -> None:
    """Two levels down, bound and only built, and again on the arenas that are there by then."""
    case = outer(cls)
    second = on_runtime_of(case, inner(cls, [[1, 0, 0], [2, 10, 0], [3, 4, 6]]))
    third = on_runtime_of(case, decode(cls, [[5, 0, 0], [6, 1, 0], [7, 8, 9]], [2, 12, 20]))
    for _ in range(4):  # from the third on all are of a known kind
        with case.bind():
            first_metadata = ambient.get_forward_context().attn_metadata
            first = tensors_in(first_metadata)
            with second.bind():
                second_metadata = ambient.get_forward_context().attn_metadata
                values = tensors_in(second_metadata)
                assert values != first
                with third.bind():
                    pass
                third.build()
                assert tensors_in(second_metadata) == values
            second.build()
            assert tensors_in(first_metadata) == first
    assert len(kept_on(case.runtime).buffers.eager._arenas) == 3


@every_class
def test_passes_in_turn_take_one_arena(cls: Any) -> None:
    case = decode(cls)
    other = on_runtime_of(case, prefill(cls))
    for _ in range(3):
        for each in (case, other, decode(cls)):
            with each.bind():
                pass
        case.build()
    assert len(kept_on(case.runtime).buffers.eager._arenas) == 1


@every_class
def test_threads_do_not_overwrite_each_others_values(cls: Any, ambient: Ambient) -> None:
    case = decode(cls)
    other = on_runtime_of(case, prefill(cls))
    other.build()  # on an arena that is large enough for both
    for _ in range(3):
        with case.bind():
            metadata = ambient.get_forward_context().attn_metadata
            before = tensors_in(metadata)
            thread = threading.Thread(target=other.build)
            thread.start()
            thread.join()
            assert tensors_in(metadata) == before


def name_of_first_group(cls: Any) -> str:
    case = decode(cls)
    case.build()
    groups = kept_on(case.runtime).groups
    assert groups is not None
    return groups.planned[0].group.name


@every_class
def test_strict_raises_before_it_returns_and_leaves_nothing_bound(cls: Any, ambient: Ambient) -> None:
    case = decode(cls, HOLE)
    with pytest.raises(BlockFaultError, match=r"got entries missing or out of range: 1 in group .* \(first in row 1\)"):
        case.build(strict=True)
    with pytest.raises(BlockFaultError, match="block tables: got entries missing"), case.bind(strict=True):
        raise AssertionError("bound")
    assert ambient.get_forward_context().attn_metadata is None
    on_runtime_of(case, decode(cls, GOOD)).build(strict=True)  # those faults have been raised


@every_class
def test_faults_of_a_pass_are_raised_once_by_a_later_one(cls: Any, ambient: Ambient) -> None:
    case = decode(cls, HOLE)
    with case.bind():
        slots = ambient.get_forward_context().attn_metadata.slot_mapping.tolist()
    assert slots == [39, -1, 40]
    good = on_runtime_of(case, decode(cls, GOOD))
    name = re.escape(name_of_first_group(cls))
    message = rf"block tables of earlier steps: got .* in group '{name}' \(first in row 1\)"
    with pytest.raises(BlockFaultError, match=message), good.bind():
        raise AssertionError("bound")
    assert ambient.get_forward_context().attn_metadata is None
    with good.bind():
        assert ambient.get_forward_context().attn_metadata.slot_mapping.tolist() == [39, 72, 40]


@every_class
def test_faults_of_a_nested_pass_and_of_an_outgrown_arena_are_raised_too(cls: Any) -> None:
    case = decode(cls)
    hole = on_runtime_of(case, decode(cls, HOLE))
    with case.bind(), hole.bind():
        pass
    with pytest.raises(BlockFaultError, match="earlier steps"):
        case.build()
    hole.build()
    pool = kept_on(case.runtime).buffers.eager
    assert pool.fault_counts is not None
    pool.fault_counts.seen[0] = 0  # as before a GPU has come that far
    small = dict(pool._arenas)
    longer = on_runtime_of(case, decode(cls, [[4, *range(1, 12)]], [90]))
    longer.build()
    assert pool._arenas != small
    pool.fault_counts.seen[0] = 1
    with pytest.raises(BlockFaultError, match="earlier steps"):
        longer.build()


@every_class
def test_a_strict_pass_tells_earlier_faults_from_its_own(cls: Any) -> None:
    case = decode(cls, HOLE)
    case.build()
    with pytest.raises(BlockFaultError, match="block tables of earlier passes"):
        case.build(strict=True)
    with pytest.raises(BlockFaultError, match="block tables: got"):
        case.build(strict=True)


@every_class
def test_passes_that_are_not_to_raise_do_so_only_when_asked(cls: Any) -> None:
    case = decode(cls, HOLE)
    case.build(strict=False)
    on_runtime_of(case, decode(cls, GOOD)).build()
    with pytest.raises(BlockFaultError, match="eager passes that are not strict"):
        cls.check_faults(case.runtime)
    cls.check_faults(case.runtime)


@every_class
def test_check_faults_raises_those_of_the_last_pass(cls: Any) -> None:
    case = decode(cls, HOLE)
    cls.check_faults(case.runtime)
    case.build()
    with pytest.raises(BlockFaultError, match="block tables of eager passes"):
        cls.check_faults(case.runtime)
    cls.check_faults(case.runtime)


@every_class
def test_faults_of_captured_passes_are_raised_by_a_later_eager_one(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = decode(cls, HOLE)
    with monkeypatch.context() as patch:
        capture(patch)
        case.build(cg_max_seq_len=24)
        case.build(cg_max_seq_len=24)  # a capture looks at nothing
    good = on_runtime_of(case, decode(cls, GOOD))
    with pytest.raises(BlockFaultError, match="earlier steps"):
        good.build()
    good.build()


def test_faults_are_raised_before_their_groups_are_forgotten() -> None:
    case = decode(PLAIN, HOLE)
    case.build()
    for layer in case.runtime.kv_cache.layers.values():
        layer.kv_cache_base = torch.zeros(20, 2, 1, 8, 4)
    good = on_runtime_of(case, decode(PLAIN, GOOD))
    with pytest.raises(BlockFaultError, match="block tables of eager passes"):
        good.build()
    good.build()


def test_a_warm_up_with_all_zero_lengths_has_no_faults() -> None:
    case = decode(HYBRID, [[0, 0], [0, 0]], [0, 0])
    case.attention.sequence_lengths_plus_1_device.zero_()
    case.build(strict=True)
    HYBRID.check_faults(case.runtime)
