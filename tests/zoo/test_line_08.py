"""Zero-length padding rows of a full decode graph advance somebody's recurrent state.
Guards: fill_torch `group_plan.state_write[rows:] = -1`, and lengths of 0 where RTP's tables say padding
(hosts/rtp_llm/steps.py)."""

from __future__ import annotations

import pytest
import torch

from stepbind import Phase
from tests.hosts.rtp_double.by_hand import Host, expected
from tests.hosts.rtp_double.graphs import GraphRunner
from tests.hosts.rtp_double.inputs import GENERATIONS, Row
from tests.zoo.captured import Captured
from tests.zoo.harness import HandMade, assert_close, tokens


def test_padding_rows_advance_nobodys_state() -> None:
    """A larger batch left its slots in the buffers and its blocks in the table's padding rows."""
    host = HandMade()
    sequences = [tokens(6, seed=row) for row in range(4)]
    tables = [[row + 1] for row in range(4)]
    host.run([each[:5] for each in sequences], [0] * 4, tables, tables)
    host.run([each[4:5] for each in sequences], [4] * 4, tables, tables, phase=Phase.DECODE)
    others = [host.block_bytes(layer, block) for layer in host.buffers for block in (2, 3, 4)]
    host.run([sequences[0][:5]], [0], [[1]], [[1]])
    logits, plan = host.run([sequences[0][5:]], [5], tables, tables, phase=Phase.DECODE, padded_rows=4, padded_tokens=4)
    assert [host.block_bytes(layer, block) for layer in host.buffers for block in (2, 3, 4)] == others
    assert_close(logits[0], host.expected(sequences[0])[5])
    assert plan.shared.context_len.tolist() == [6, 0, 0, 0]


def test_padding_rows_of_a_replay_advance_nobodys_state() -> None:
    """A graph of four rows whose last batch was full; then one row is live, and the tables of the others stay."""
    host, sequences = HandMade(), [tokens(7, seed=row) for row in range(4)]
    graph, tables = Captured(host, 4), [[row + 1] for row in range(4)]
    host.run([each[:5] for each in sequences], [0] * 4, tables, tables)
    both = {"attention": tables, "state": tables}
    graph.replay(both, [each[5:6] for each in sequences], [5] * 4)
    others = [host.block_bytes(layer, block) for layer in host.buffers for block in (2, 3, 4)]
    logits = graph.replay({}, [sequences[0][6:]], [6])
    assert_close(logits[0], host.expected(sequences[0])[6])
    assert [host.block_bytes(layer, block) for layer in host.buffers for block in (2, 3, 4)] == others


@pytest.mark.parametrize("query", [1, 3])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_stale_lengths_of_rtps_padding_rows_are_nobodys(generation: str, query: int) -> None:
    """RTP's replay leaves the lengths of the last larger batch in the padding rows; only their tables say it."""
    host = Host(generation)
    graphs = GraphRunner(host, host.layout, [4], 32, query)
    tables = [[[2 * i + 1, 2 * i + 2, i + 12, i + 17], [2 * i + 1, 2 * i + 2]] for i in range(4)]
    prompts = [tokens(5 + index, index) for index in range(4)]
    rows = [Row(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
    host.run(host.inputs(Phase.PREFILL, rows))
    graphs.replay([Row([1] * query, len(prompt), table) for prompt, table in zip(prompts, tables, strict=True)])
    host.run(host.inputs(Phase.PREFILL, rows[:1]))
    states = [host.buffers[0][block].clone() for block in range(3, 9)]
    new = tokens(query, 9)
    got = graphs.replay([Row(new, 5, tables[0])])
    assert_close(got, expected(prompts[0] + new)[-query:])
    assert all(torch.equal(host.buffers[0][block], state) for block, state in zip(range(3, 9), states, strict=True))
    with host.binding.bind(graphs.captured[4].inputs, is_graph=True) as context:
        shared = context.plan.shared
        assert shared.query_len.tolist() == [query, 0, 0, 0]
        assert shared.context_len.tolist() == [5 + query, 0, 0, 0]
