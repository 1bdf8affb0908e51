"""Zoo line 26 on a GPU: nothing waits for it, in torch's sync debug mode. tests/zoo shows the same of a device that has
no values to read back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from stepbind import CacheGroup, Caches, GroupKind, Phase, adapted, bind, build_plan, discover_layers, make_arena
from stepbind.hosts.local.graphs import DecodeGraphs
from stepbind.hosts.local.memory import allocate_buffers
from stepbind.hosts.local.request import SamplingParams, Sequence
from stepbind.hosts.local.rows import DecodeRows
from stepbind.step import BlockTable, Lengths, Step
from stepbind.tiny import tiny_model

GROUPS = (
    CacheGroup("attention", GroupKind.ATTENTION, (3,), 16, 16, 64),
    CacheGroup("state", GroupKind.STATE, (0, 1, 2), 16, 16, 64),
)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def model_and_caches() -> tuple[Any, Caches]:
    model = tiny_model("qwen3_5").cuda()
    layers = discover_layers(model)
    buffers = allocate_buffers(layers, GROUPS, model.device)
    return model, Caches.of(GROUPS, {layer.index: layer.spec for layer in layers}, buffers)


def step_of(phase: Phase, query: int, rows: int = 3) -> Step:
    def lengths(value: int) -> Lengths:
        host = Lengths.of([value] * rows)
        return Lengths(host.host, torch.from_numpy(host.host).cuda())

    ids = torch.arange(1, 10 * rows + 1, dtype=torch.int32, device="cuda").reshape(rows, 10)
    return Step(phase, lengths(query), lengths(9), tuple(BlockTable(group, ids.clone()) for group in GROUPS))


@torch.no_grad()
@pytest.mark.parametrize(("phase", "query"), [(Phase.PREFILL, 70), (Phase.DECODE, 1), (Phase.VERIFY, 3)])
def test_a_pass_from_step_to_logits_does_not_wait(phase: Phase, query: int) -> None:
    model, caches = model_and_caches()
    step = step_of(phase, query)
    arena = make_arena(GROUPS, max_rows=4, max_tokens=256, max_context=160, device="cuda")
    ids = torch.zeros(1, step.padded_tokens, dtype=torch.long, device="cuda")

    def run() -> torch.Tensor:
        plan = build_plan(step, arena)
        with bind(plan, caches, model):
            return model(ids, position_ids=plan.shared.position[None], use_cache=False).logits  # type: ignore[no-any-return]

    with adapted(model):
        for _ in range(3):  # kernels are compiled, and addresses seen for the first time
            run()
        with no_waiting():
            logits = run()
    assert logits.isfinite().all()
    assert arena.faults[:, 0].tolist() == [0, 0]


@torch.no_grad()
def test_replays_of_the_local_hosts_graphs_do_not_wait() -> None:
    """Over a block boundary, where a table is sent again; the tokens stay on the GPU."""
    model, caches = model_and_caches()
    arena = make_arena(GROUPS, max_rows=4, max_tokens=4, max_context=160, device="cuda")
    rows = DecodeRows(GROUPS, max_rows=4, max_context=160, device=arena.device)
    graphs = DecodeGraphs(model, arena, caches, rows, (1,), compile_layers=False)
    with adapted(model):
        graphs.capture()
        sequences = [Sequence(number, 4, [1] * 40, SamplingParams()) for number in range(3)]
        for number, sequence in enumerate(sequences):
            sequence.computed = 13
            sequence.tables = [[10 * number + 1 + column for column in range(4)] for _ in GROUPS]
        rows.set(sequences)
        graph = graphs.for_rows(3)
        with no_waiting():
            graph.replay()
            for _ in range(5):
                rows.go_on()
                graph.replay()
    assert rows.prior_len.tolist() == [19, 19, 19, 0]
    assert arena.faults[:, 0].tolist() == [0, 0]
