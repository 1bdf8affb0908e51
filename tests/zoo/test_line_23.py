"""Positions not refreshed by replay: rotary embedding stands still. Guards: positions are counted from the lengths by
the fill (plan/fill_torch.py), which a replay runs; the local host's graphs rotate by them, and those on RTP never by
RTP's position ids, which its replay leaves as they were."""

from __future__ import annotations

import pytest
import torch

from stepbind import EngineOptions, LocalEngine, Phase, SamplingParams
from tests.hosts.rtp_double.by_hand import Host, expected
from tests.hosts.rtp_double.graphs import POISON, GraphRunner
from tests.hosts.rtp_double.inputs import GENERATIONS, Row
from tests.zoo.captured import Captured
from tests.zoo.harness import HandMade, assert_close, hybrid, tokens

TABLES = [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_rotary_moves_with_every_replay() -> None:
    """Two rows far apart, over two block boundaries each."""
    host, sequences = HandMade(), [tokens(24, seed=1), tokens(31, seed=2)]
    graph, start = Captured(host, 2), [6, 13]
    host.run([sequences[0][:6], sequences[1][:13]], [0, 0], TABLES, TABLES)
    for step in range(18):
        at = [begin + step for begin in start]
        new = [[sequences[row][at[row]]] for row in range(2)]
        logits = graph.replay({"attention": TABLES, "state": TABLES}, new, at)
        assert graph.plan.shared.position.tolist() == at
        for row in range(2):
            assert_close(logits[row], host.expected(sequences[row])[at[row]])


def test_the_local_hosts_graphs_rotate_by_their_rows_positions() -> None:
    sequence = tokens(11)
    with torch.no_grad():
        for _ in range(12):
            sequence.append(int(hybrid()(torch.tensor([sequence]), use_cache=False).logits[0, -1].argmax()))
    options = EngineOptions(block_size=8, token_budget=16, max_rows=3, cache_tokens=64, graphs=True, graph_rows=(2,))
    with LocalEngine(hybrid(), options=options) as engine:
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, return_logits=True)
        [got] = engine.generate([sequence[:11]], sampling)
    assert got.tokens == sequence[11:]
    assert got.logits is not None
    assert_close(got.logits, HandMade().expected(sequence)[10:-1])


@pytest.mark.parametrize("generation", GENERATIONS)
def test_rtps_graphs_do_not_rotate_by_position_ids_that_replay_leaves_alone(generation: str) -> None:
    host, sequence = Host(generation), tokens(20)
    tables = [[5, 6, 7], [1, 2, 3]]
    host.run(host.inputs(Phase.PREFILL, [Row(sequence[:6], 0, tables)]))
    graphs = GraphRunner(host, host.layout, [2], 32)
    for position in range(6, 20):
        got = graphs.replay([Row([sequence[position]], position, tables)])
        assert_close(got[0], expected(sequence)[position])
    assert graphs.positions.tolist() == [POISON, POISON]
