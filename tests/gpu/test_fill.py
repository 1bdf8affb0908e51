"""The fill kernels on a GPU: the reference's values, and nothing that waits or allocates."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from triton import knobs

from stepbind.groups import CacheGroup, GroupKind
from stepbind.plan import PagedPlan, build_plan, make_arena
from stepbind.step import BlockTable, BlockTables, Lengths, Phase, Step
from tests.fill_checks import check_fill, check_fills_in_a_row, on_device, poisoned_arena
from tests.random_steps import bounded_step, steps


@settings(max_examples=300)
@given(steps() | st.integers(0, 2**32).map(bounded_step), st.booleans(), st.booleans())
def test_the_fill_kernels_equal_the_reference(step: Step, device_lengths: bool, contexts: bool) -> None:
    step = on_device(step, "cuda", device_lengths=device_lengths, contexts=contexts)
    check_fill(step, poisoned_arena(step))


def test_fills_that_nothing_waits_between_do_not_disturb_each_other() -> None:
    check_fills_in_a_row("cuda", 600)


GROUPS = (
    CacheGroup("attention", GroupKind.ATTENTION, tuple(range(3, 48, 4)), 64, 16, 5000),
    *(CacheGroup(f"state{i}", GroupKind.STATE, tuple(range(i, 48, 4)), 64, 64, 5000) for i in range(3)),
)


def hybrid_step(phase: Phase, rows: int, query: int, prior: int, *, device_lengths: bool) -> Step:
    def lengths(value: int) -> Lengths:
        host = Lengths.of([value] * rows)
        return Lengths(host.host, torch.from_numpy(host.host).cuda()) if device_lengths else host

    columns = (query + prior) // 64 + 1
    ids = torch.arange(1, rows * columns + 1, dtype=torch.int32, device="cuda").reshape(rows, columns)
    tables = tuple(BlockTable(group, ids.clone()) for group in GROUPS)
    return Step(phase, lengths(query), lengths(prior), tables)


def test_a_profilers_hook_hears_fills() -> None:
    arena = make_arena(GROUPS, max_rows=2, max_tokens=2, max_context=64, device="cuda")
    step, heard = hybrid_step(Phase.DECODE, 2, 1, 9, device_lengths=True), []
    build_plan(step, arena)
    before, knobs.runtime.launch_enter_hook = knobs.runtime.launch_enter_hook, lambda metadata: heard.append(metadata)
    try:
        build_plan(step, arena)
    finally:
        knobs.runtime.launch_enter_hook = before
    build_plan(step, arena)
    assert [of.get()["name"] for of in heard] == ["fill_decode"]


def test_lengths_that_wait_for_a_busy_gpu_are_their_own_steps() -> None:
    """The host is hundreds of steps ahead: no copy has left its pinned memory when the next step writes its own."""
    rng, rows, count = random.Random(0), 20, 250
    arena = make_arena(GROUPS, max_rows=rows, max_tokens=rows * 64, max_context=512, device="cuda")
    tables = BlockTables(hybrid_step(Phase.PREFILL, rows, 64, 447, device_lengths=False).tables)
    seen = torch.zeros(count, rows, dtype=torch.int32, device="cuda")

    def fill(into: torch.Tensor) -> list[int]:
        query, prior = ([rng.randint(low, high) for _ in range(rows)] for low, high in ((1, 64), (0, 400)))
        step = Step(Phase.PREFILL, Lengths.of(query), Lengths.of(prior), tables)
        into.copy_(build_plan(step, arena, strict=False).shared.context_len)
        return [new + old for new, old in zip(query, prior, strict=True)]

    fill(seen[0])  # compiles the kernel
    launcher = arena.launcher
    assert launcher is not None
    for is_busy in (True, False):
        torch.cuda.synchronize()
        seen.fill_(-1)
        if is_busy:
            torch.cuda._sleep(10**9)  # about half a second
        expected = [fill(into) for into in seen]
        pages = len(launcher.staging._pages)
        assert seen.tolist() == expected
        assert pages > 1


def events_of_a_fill(step: Step) -> tuple[list[str], int]:
    """Names of the device's events in one fill after warm-up, and the allocations that torch made; it may not wait."""
    arena = make_arena(GROUPS, max_rows=256, max_tokens=8192, max_context=8192, device="cuda")
    for _ in range(3):
        build_plan(step, arena, strict=False)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    mode = torch.cuda.get_sync_debug_mode()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda.set_sync_debug_mode("error")
        try:
            build_plan(step, arena, strict=False)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize()
    on_device = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return on_device, torch.cuda.memory_stats()["allocation.all.allocated"] - allocated


def test_a_decode_fill_is_one_launch_and_nothing_else() -> None:
    for rows in (1, 32, 256):
        events, allocations = events_of_a_fill(hybrid_step(Phase.DECODE, rows, 1, 511, device_lengths=True))
        assert events == ["fill_decode"]
        assert allocations == 0


def test_a_prefill_fill_is_one_copy_and_one_launch() -> None:
    for rows, query in ((1, 8192), (16, 512)):
        events, allocations = events_of_a_fill(hybrid_step(Phase.PREFILL, rows, query, 0, device_lengths=False))
        assert [name.split(" ")[0] for name in events] == ["Memcpy", "fill_ragged"]
        assert allocations == 0


def test_a_captured_fill_follows_lengths_and_tables_that_change_in_place() -> None:
    step = hybrid_step(Phase.DECODE, 8, 1, 100, device_lengths=True)
    arena = make_arena(GROUPS, max_rows=8, max_tokens=8, max_context=512, device="cuda")
    build_plan(step, arena, strict=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = build_plan(step, arena, strict=False)
    assert step.query_len.device is not None
    assert step.prior_len.device is not None
    step.query_len.device[5:] = 0
    step.prior_len.device.copy_(torch.tensor([63, 64, 65, 0, 7, 0, 0, 0]))
    step.tables[0].blocks[0, 0] = 4000
    graph.replay()
    paged = plan.groups[0]
    assert isinstance(paged, PagedPlan)
    assert plan.shared.context_len.tolist() == [64, 65, 66, 1, 8, 0, 0, 0]
    assert plan.shared.row_of_token.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    blocks = step.tables[0].blocks.tolist()
    slots = [blocks[0][0] * 64 + 63, blocks[1][1] * 64, blocks[2][1] * 64 + 1, blocks[3][0] * 64, blocks[4][0] * 64 + 7]
    assert paged.slot.tolist() == [*slots, -1, -1, -1]
