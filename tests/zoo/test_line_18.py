"""A host loop over lengths runs at capture when several tokens a row are verified: positions frozen.

A replay says its lengths on the device alone. Guards: fill_torch counts positions, slots and columns from the device's
lengths; in RTP's graphs those come from what its replay refreshes (hosts/rtp_llm/steps.py)."""

from __future__ import annotations

import pytest

from stepbind import Phase, make_step
from stepbind.plan import StatePlan
from stepbind.plan.reference import reference_plan
from tests.hosts.rtp_double.by_hand import Host, expected
from tests.hosts.rtp_double.graphs import GraphRunner
from tests.hosts.rtp_double.inputs import GENERATIONS, Row
from tests.plan.test_fill import assert_group_equals_reference
from tests.zoo.captured import Captured
from tests.zoo.harness import HandMade, assert_close, tokens

DRAFTS = 3
# Prompts that end inside a block, at its last token, and right behind a boundary: every one has another context.
PROMPTS = [tokens(length, seed=length) for length in (5, 12, 7, 16)]
TABLES = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16, 17]]
NEW = [tokens(DRAFTS, seed=50 + row) for row in range(4)]


def test_every_replay_of_a_verify_graph_counts_from_the_lengths_of_then() -> None:
    host = HandMade()
    graph = Captured(host, 2, Phase.VERIFY, DRAFTS)
    for rows in ([0, 1], [3, 2], [1], [2, 0]):
        for row in rows:
            host.run([PROMPTS[row]], [0], [TABLES[row]], [TABLES[row]])
        tables, prior = [TABLES[row] for row in rows], [len(PROMPTS[row]) for row in rows]
        both = {"attention": tables, "state": tables}
        logits = graph.replay(both, [NEW[row] for row in rows], prior)
        for index, row in enumerate(rows):
            want = host.expected(PROMPTS[row] + NEW[row])[-DRAFTS:]
            assert_close(logits[index * DRAFTS : (index + 1) * DRAFTS], want)
        own = {name: table[: len(rows)] for name, table in graph.tables.items()}
        step = make_step(host.groups, Phase.VERIFY, [DRAFTS] * len(rows), prior, own)
        live, plan, reference = len(rows) * DRAFTS, graph.plan, reference_plan(step)
        assert plan.shared.position[:live].tolist() == reference.position
        assert plan.groups[0].slot[:live].tolist() == reference.groups[0].slot  # type: ignore[union-attr]
        states = plan.groups[1]
        assert isinstance(states, StatePlan)
        if len(rows) == 2:
            assert_group_equals_reference(states, reference.groups[1])
        assert (plan.shared.row_of_token[live:] == -1).all()
        assert (states.snapshots.slot[len(rows) * (DRAFTS - 1) :] == -1).all()


@pytest.mark.parametrize("generation", GENERATIONS)
def test_rtps_verify_graphs_take_nothing_that_its_capture_said(generation: str) -> None:
    host = Host(generation)
    tables = [[table, table[:3]] for table in TABLES]
    graphs = GraphRunner(host, host.layout, [2], 32, DRAFTS)
    for batch in ([0, 1], [3, 2], [1], [2, 0]):
        host.run(host.inputs(Phase.PREFILL, [Row(PROMPTS[row], 0, tables[row]) for row in batch]))
        got = graphs.replay([Row(NEW[row], len(PROMPTS[row]), tables[row]) for row in batch])
        for index, row in enumerate(batch):
            want = expected(PROMPTS[row] + NEW[row])[-DRAFTS:]
            assert_close(got[index * DRAFTS : (index + 1) * DRAFTS], want)
