"""RTP's graphs by hand: what a replay takes, and what it does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from stepbind.errors import StepError
from stepbind.step import Phase
from tests.hosts.rtp_double.by_hand import BLOCK, KERNEL, Host, expected
from tests.hosts.rtp_double.graphs import POISON, GraphRunner
from tests.hosts.rtp_double.inputs import GENERATIONS, Row, int32
from tests.zoo.harness import assert_close, tokens


@pytest.fixture(params=GENERATIONS)
def host(request: pytest.FixtureRequest) -> Host:
    return Host(request.param)


@pytest.mark.parametrize("query", [1, 3])
def test_a_replay_of_fewer_rows_takes_nothing_from_stale_lengths(host: Host, query: int) -> None:
    """A batch of 4, then one of 2 in a graph of 4, whose padding rows keep the lengths of the larger batch."""
    prompts = [tokens(5 + index, index) for index in range(4)]
    tables = [[[2 * i + 1, 2 * i + 2, i + 12, i + 17], [2 * i + 1, 2 * i + 2]] for i in range(4)]
    rows = [Row(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
    host.run(host.inputs(Phase.PREFILL, rows))
    graphs = GraphRunner(host, host.layout, [2, 4], 32, query)
    new = [tokens(query, 10 + index) for index in range(4)]
    got = graphs.replay([Row(new[i], len(prompts[i]), tables[i]) for i in range(4)])
    for i in range(4):
        assert_close(got[i * query : (i + 1) * query], expected(prompts[i] + new[i])[-query:])
    graphs.captured[2] = graphs.captured[4]
    untouched = [host.buffers[0].clone(), host.buffers[1].clone()]
    got = graphs.replay([Row(new[3], len(prompts[3]), tables[3])])
    assert_close(got, expected(prompts[3] + new[3])[-query:])
    with host.binding.bind(graphs.captured[4].inputs, is_graph=True) as context:
        shared, prior = context.plan.shared, len(prompts[3])
        assert shared.query_len.tolist() == [query, 0, 0, 0]
        assert shared.prior_len.tolist() == [prior, 0, 0, 0]
        assert shared.context_len.tolist() == [prior + query, 0, 0, 0]
    owned_state, owned = tables[3]
    for buffer, before, blocks, ratio in (
        (host.buffers[0], untouched[0], owned_state, 1),
        (host.buffers[1], untouched[1], owned, BLOCK // KERNEL),
    ):
        others = [b for b in range(buffer.shape[0]) if b // ratio not in blocks]
        assert torch.equal(buffer[others].view(torch.int8), before[others].view(torch.int8))


def test_captured_passes_take_no_position_that_replay_does_not_refresh(host: Host) -> None:
    graphs = GraphRunner(host, host.layout, [2], 32)
    assert graphs.positions.tolist() == [POISON, POISON]
    with host.binding.bind(graphs.captured[2].inputs, is_graph=True) as context:
        assert context.plan.shared.position.tolist() == [0, 0]


def test_a_replay_says_when_a_row_is_too_long(host: Host) -> None:
    decode = SimpleNamespace(sequence_lengths=int32([3, 128]))
    verify = SimpleNamespace(prefix_lengths=int32([3, 126]), input_lengths=int32([3, 3]))
    for lengths in (decode, verify, {"full": decode}):
        with pytest.raises(StepError, match="context of a replayed row: got 129, expected at most 128 tokens"):
            host.binding.check_replay(lengths)
    host.binding.check_replay(SimpleNamespace(sequence_lengths=int32([127])))
    host.binding.check_replay(SimpleNamespace(sequence_lengths=None))


def test_a_prefill_in_a_graph_is_an_error(host: Host) -> None:
    with pytest.raises(StepError, match="is_cuda_graph: got a prefill pass, expected decode or target verify"):
        host.run(host.inputs(Phase.PREFILL, [Row([1], 0, [[5], [1]])]), is_graph=True)
