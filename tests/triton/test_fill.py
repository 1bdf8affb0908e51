"""The fill kernels, in Triton's interpreter, equal the plain reference on random steps."""

from __future__ import annotations

import dataclasses
import weakref
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from stepbind.groups import CacheGroup, GroupKind
from stepbind.plan import Arena, PagedPlan, StatePlan, build_plan, fill_triton, make_arena
from stepbind.plan.fill_kernels import int32
from stepbind.plan.launch import pointer_to
from stepbind.plan.staging import SLOTS_OF_A_PAGE
from stepbind.step import BlockTable, Lengths, Phase, Step, make_step
from tests.fill_checks import check_fill, check_fills_in_a_row, on_device, poisoned_arena, with_garbage_tables
from tests.random_steps import bounded_step, random_step, steps


@settings(max_examples=40)
@given(
    steps() | st.integers(0, 2**32).map(bounded_step),
    st.booleans(),
    st.booleans(),
    st.sampled_from([64, 512]),
    st.sampled_from([8, 1056]),
)
def test_the_fill_kernels_equal_the_reference(
    step: Step, device_lengths: bool, contexts: bool, columns: int, programs: int
) -> None:
    """However many columns a program copies at once, and however many programs share a row's."""
    with patch.multiple(fill_triton, COLUMNS=columns, PROGRAMS=programs):
        there = on_device(step, "cpu", device_lengths=device_lengths, contexts=contexts)
        check_fill(there, poisoned_arena(step))


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_tables_of_nothing_but_garbage_equal_the_reference(seed: int) -> None:
    step = on_device(with_garbage_tables(random_step(seed), seed), "cpu", device_lengths=seed % 2 == 0)
    check_fill(step, poisoned_arena(step))


def test_fills_in_a_row_do_not_disturb_each_other() -> None:
    check_fills_in_a_row("cpu", SLOTS_OF_A_PAGE + 2)


@settings(max_examples=30)
@given(st.integers(0, 2**32).map(bounded_step))
def test_the_fill_kernels_take_lengths_that_only_the_device_knows(step: Step) -> None:
    check_fill(step, poisoned_arena(step))


ATTENTION = CacheGroup("attention", GroupKind.ATTENTION, (0,), 4, 2, 100)
STATE = CacheGroup("state", GroupKind.STATE, (1,), 4, 4, 100)


def decode_step(prior: list[int]) -> Step:
    """Rows with device lengths; row r's blocks are 10r+1, 10r+2, ..."""
    blocks = torch.tensor([[10 * row + 1 + c for c in range(4)] for row in range(len(prior))], dtype=torch.int32)
    tables = {"attention": blocks, "state": blocks.clone()}
    step = make_step((ATTENTION, STATE), Phase.DECODE, [1] * len(prior), prior, tables)
    return on_device(step, "cpu", device_lengths=True)


def arena_for_decode() -> Arena:
    return make_arena((ATTENTION, STATE), max_rows=8, max_tokens=8, max_context=16)


def test_a_step_at_known_addresses_and_sizes_makes_no_tensor() -> None:
    arena = arena_for_decode()
    first, step = build_plan(decode_step([3, 5]), arena, triton=True), decode_step([4, 9])
    build_plan(step, arena, triton=True)
    launcher = arena.launcher
    assert launcher is not None
    buckets, descriptors = dict(launcher.buckets), dict(launcher.descriptors)
    again = build_plan(dataclasses.replace(step), arena, triton=True)
    assert (launcher.buckets, launcher.descriptors) == (buckets, descriptors)
    assert again.shared is first.shared
    assert again.groups is first.groups
    assert any(again.descriptor is descriptor for descriptor in descriptors.values())


def test_a_prefill_of_new_counts_compiles_nothing_and_keeps_the_views_of_its_rows() -> None:
    blocks = torch.arange(1, 9, dtype=torch.int32).reshape(2, 4)
    tables = {"attention": blocks, "state": blocks.clone()}
    arena = make_arena((ATTENTION, STATE), max_rows=2, max_tokens=20, max_context=16)
    plans = []
    for query in ([3, 7], [2, 6], [4, 5], [9, 9]):
        step = make_step((ATTENTION, STATE), Phase.PREFILL, query, [0, 1], tables)
        plans.append(build_plan(step, arena, triton=True))
    launcher = arena.launcher
    assert launcher is not None
    assert (len(launcher.buckets), len(launcher.compiled)) == (4, 1)
    assert len({id(plan.shared.query_len) for plan in plans}) == 1
    assert [plan.shared.position.shape[0] for plan in plans] == [10, 8, 9, 18]
    # Boundaries at 4 and 8 tokens: as many in the first three steps, one more in the last one's first row.
    states = [plan.groups[1] for plan in plans]
    assert states[0] is states[1] is states[2]
    assert [state.snapshots.row.shape[0] for state in states if isinstance(state, StatePlan)] == [1, 1, 1, 4]


def test_what_is_kept_for_many_sizes_is_bounded() -> None:
    arena = make_arena((ATTENTION, STATE), max_rows=8, max_tokens=8, max_context=16)
    with patch.multiple(fill_triton, MAX_BUCKETS=3, MAX_DESCRIPTORS=3):
        for rows in (1, 2, 3, 4, 5, 6, 1):
            plan = build_plan(decode_step([3] * rows), arena, triton=True)
            assert plan.shared.context_len.tolist() == [4] * rows
    launcher = arena.launcher
    assert launcher is not None
    assert [len(of) for of in (launcher.buckets, launcher.row_views, launcher.state_views)] == [3, 3, 3]
    assert len(launcher.descriptors) <= 3


@triton.jit
def _store_address(out, address):
    tl.store(out, int32(address).to(tl.int64))


def test_addresses_that_fit_in_32_bits_are_addresses_too() -> None:
    """As a Python has them that is no position-independent executable, Debian's own among them."""
    out = torch.zeros(1, dtype=torch.int64)
    for address in (2**20, 2**31 - 4, 2**40):
        _store_address[(1,)](out, address)
        assert out.item() == address


def test_a_replayed_launch_sees_what_the_host_changed_in_place() -> None:
    """What a captured graph does: the same kernel on the same descriptor, with other lengths and tables in them."""
    arena, step = arena_for_decode(), decode_step([3, 5, 6])
    plan = build_plan(step, arena, triton=True)
    assert step.prior_len.device is not None
    assert step.query_len.device is not None
    step.query_len.device[2] = 0  # the third row is padding now
    step.prior_len.device.copy_(torch.tensor([4, 1, 0]))
    step.tables[0].blocks[0, 1] = 77
    step.tables[1].blocks[0, 1] = 78
    launcher = arena.launcher
    assert launcher is not None
    call = next(iter(launcher.buckets.values())).call
    query, prior = step.query_len.device, step.prior_len.device
    assert plan.descriptor is not None
    call.launch(pointer_to(plan.descriptor), query.data_ptr(), prior.data_ptr(), 3, *call.arguments)
    paged, state = plan.groups
    assert isinstance(paged, PagedPlan)
    assert isinstance(state, StatePlan)
    assert plan.shared.context_len.tolist() == [5, 2, 0]
    assert plan.shared.row_of_token.tolist() == [0, 1, -1]
    assert paged.slot.tolist() == [77 * 4, 11 * 4 + 1, -1]
    assert state.state_read.tolist() == [1, 11, -1]
    assert state.state_write.tolist() == [78, 11, -1]


def test_lengths_that_the_host_alone_has_are_sent_anew_in_every_step() -> None:
    blocks = torch.arange(1, 9, dtype=torch.int32).reshape(2, 4)
    tables = {"attention": blocks, "state": blocks.clone()}
    arena = make_arena((ATTENTION, STATE), max_rows=2, max_tokens=20, max_context=16)
    for length in range(SLOTS_OF_A_PAGE + 2):
        query, prior = [length % 9 + 1, length % 5 + 1], [length % 7, length % 11]
        step = make_step((ATTENTION, STATE), Phase.PREFILL, query, prior, tables)
        plan = build_plan(step, arena, triton=True)
        assert plan.shared.query_len.tolist() == query
        assert plan.shared.prior_len.tolist() == prior
        assert plan.shared.query_start.tolist() == [0, query[0], sum(query)]


def test_descriptors_of_moved_tables_do_not_disturb_each_other() -> None:
    arena = arena_for_decode()
    step = decode_step([3, 5])
    plan = build_plan(step, arena, triton=True)
    assert plan.descriptor is not None
    before = plan.descriptor.clone()
    moved = tuple(BlockTable(t.group, t.blocks.clone(), t.granularity) for t in step.tables)
    other = build_plan(dataclasses.replace(step, tables=moved), arena, triton=True)
    assert other.descriptor is not plan.descriptor
    assert torch.equal(plan.descriptor, before)


def test_device_lengths_beyond_the_arena_write_nothing_outside_of_it() -> None:
    """A device copy that disagrees with the host's lengths gives wrong numbers, never a stray write."""
    step = decode_step([3, 5])
    wild = Lengths(step.prior_len.host, torch.tensor([10**9, 2**31 - 8], dtype=torch.int32))
    long = Lengths(step.query_len.host, torch.tensor([7, 5], dtype=torch.int32))
    arena = poisoned_arena(step)
    plan = build_plan(dataclasses.replace(step, prior_len=wild, query_len=long), arena, triton=True, strict=False)
    assert (arena.shared.row_of_token[2:] == 77).all()
    paged = plan.groups[0]
    assert isinstance(paged, PagedPlan)
    assert paged.slot.tolist()[0] == -1
    assert int(paged.block_table.max()) < ATTENTION.num_kernel_blocks


def test_what_a_graph_reads_outlives_the_room_for_it() -> None:
    """A captured fill goes on reading its descriptor, however many tables come after it."""
    step = on_device(bounded_step(1), "cpu", device_lengths=True)
    arena = poisoned_arena(step)
    with patch.object(fill_triton, "MAX_DESCRIPTORS", 2):
        build_plan(step, arena, triton=True)
        with patch.object(fill_triton, "_is_capturing", lambda arena: True):
            captured = weakref.ref(build_plan(step, arena, triton=True).descriptor)
        others = []
        for _ in range(3):
            tables = tuple(dataclasses.replace(table, blocks=table.blocks.clone()) for table in step.tables)
            others.append(dataclasses.replace(step, tables=tables))
            build_plan(others[-1], arena, triton=True)
    assert captured() is not None
