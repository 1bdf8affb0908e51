"""Dummy passes write state through rows left by finished requests, or NaN into the null block that padding reads.
Guards: fill_torch `state_write[rows:] = -1`, -1 for the slots of a dummy's tokens, and none for the null block."""

from __future__ import annotations

import pytest
import torch

from stepbind import Phase, build_plan
from tests.zoo.captured import Captured, spoil
from tests.zoo.harness import HandMade, assert_close, tokens


@pytest.mark.parametrize("phase", list(Phase))
def test_a_dummy_pass_changes_no_byte(phase: Phase) -> None:
    host = HandMade()
    tables = [[row + 1] for row in range(4)]
    host.run([tokens(5, seed=row) for row in range(4)], [0] * 4, tables, tables)
    before = host.all_bytes()
    logits, plan = host.run([[], []], [0, 0], [[0], [0]], [[0], [0]], phase=phase, padded_rows=4, padded_tokens=6)
    assert plan.sizes.is_dummy
    assert logits.isfinite().all()
    assert host.all_bytes() == before


@pytest.mark.parametrize("phase", list(Phase))
def test_a_dummy_pass_ignores_the_tables_that_finished_requests_left(phase: Phase) -> None:
    host = HandMade()
    tables = [[row + 1] for row in range(4)]
    host.run([tokens(5, seed=row) for row in range(4)], [0] * 4, tables, tables)
    before = host.all_bytes()
    logits, _ = host.run([[], []], [0, 0], tables[:2], tables[:2], phase=phase, padded_rows=4, padded_tokens=6)
    assert logits.isfinite().all()
    assert host.all_bytes() == before


@pytest.mark.parametrize(("phase", "query"), [(Phase.DECODE, 1), (Phase.VERIFY, 3)])
def test_a_graph_without_a_live_row_changes_no_byte(phase: Phase, query: int) -> None:
    """The warm-up passes of a capture, and a replay that has nothing to do; on tables of finished requests."""
    host = HandMade()
    tables = [[row + 1] for row in range(4)]
    host.run([tokens(5, seed=row) for row in range(4)], [0] * 4, tables, tables)
    before = host.all_bytes()
    graph = Captured(host, 4, phase, query)
    assert graph.logits.isfinite().all()
    for table in graph.tables.values():
        table[:, 0] = torch.arange(1, 5)
    spoil(host.arena)
    build_plan(graph.step, host.arena)
    assert host.forward(graph.plan, graph.ids).isfinite().all()
    assert host.all_bytes() == before


@pytest.mark.parametrize("phase", list(Phase))
def test_the_null_block_is_neither_written_nor_read(phase: Phase) -> None:
    """It holds NaN. A row whose table says nothing but null blocks is there beside a row that has its own."""
    host, sequence = HandMade(), tokens(7)
    query = 1 if phase is Phase.DECODE else 2
    host.run([sequence[:5]], [0], [[1]], [[1]])
    null = [host.block_bytes(layer, 0) for layer in host.buffers]
    tables = [[1, 2], [0, 0]]
    logits, _ = host.run([sequence[5 : 5 + query]] * 2, [5, 5], tables, tables, phase=phase, strict=False)
    assert_close(logits[:query], host.expected(sequence)[5 : 5 + query])
    assert logits.isfinite().all()
    assert [host.block_bytes(layer, 0) for layer in host.buffers] == null
