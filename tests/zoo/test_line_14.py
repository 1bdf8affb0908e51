"""Metadata made for the real rows while the graph runs padded rows: out-of-bounds reads. Guards: arena.plan_views cuts
a plan for the padded rows and tokens; fill_torch writes lengths of 0 for padding rows, and -1 for what they would look
up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from stepbind import Phase
from stepbind.plan import PagedPlan, Plan, StatePlan, build_plan
from stepbind.step import Step
from tests.fill_checks import poisoned_arena
from tests.random_steps import steps
from tests.zoo.captured import Captured
from tests.zoo.harness import NUM_BLOCKS, HandMade, assert_close, tokens

NOWHERE = 2**31 - 1


@settings(max_examples=60)
@given(steps())
def test_a_plan_has_every_value_of_every_padded_row_and_token(step: Step) -> None:
    """The GPU's fill is held to the same in tests/triton, as to all that the reference says."""
    assert_made_for_all_rows(build_plan(step, poisoned_arena(step), strict=False))


def assert_made_for_all_rows(plan: Plan) -> None:
    shared, sizes = plan.shared, plan.sizes
    live, rows, tokens = sizes.num_rows, sizes.padded_rows, sizes.padded_tokens
    assert shared.query_start.shape == (rows + 1,)
    assert shared.query_start[live:].tolist() == [sizes.num_tokens] * (rows - live + 1)
    for lengths in (shared.query_len, shared.prior_len, shared.context_len, shared.has_prior):
        assert lengths.shape == (rows,)
        assert not lengths[live:].any()
    for of_token, nothing in (
        (shared.row_of_token, -1),
        (shared.position, 0),
        (shared.span_start, 0),
        (shared.span_end, 0),
    ):
        assert of_token.shape == (tokens,)
        assert (of_token[sizes.num_tokens :] == nothing).all()
    for group in plan.groups:
        if isinstance(group, PagedPlan):
            assert group.block_table.shape[0] == rows
            assert group.slot.shape == (tokens,)
            assert (group.slot[sizes.num_tokens :] == -1).all()
        else:
            assert isinstance(group, StatePlan)
            for slot in (group.state_read, group.state_write):
                assert slot.shape == (rows,)
                assert (slot[live:] == -1).all()


@pytest.mark.parametrize("phase", list(Phase))
def test_a_pass_on_padded_rows_is_the_pass_of_its_real_rows(phase: Phase) -> None:
    """Six padded rows, of which four have tables full of ids that no pool has, after a pass that used all six."""
    query, prior = {Phase.PREFILL: (9, 0), Phase.DECODE: (1, 9), Phase.VERIFY: (3, 9)}[phase]
    new = [tokens(query, seed=10 + row) for row in range(2)]
    own = [[1, 2, 3, 4], [5, 6, 7, 8]]
    results = []
    for padding in (0, 4):
        host = HandMade()
        everyone = [[4 * row + 1 + column for column in range(4)] for row in range(5)]
        host.run([tokens(9, seed=row) for row in range(5)], [0] * 5, everyone, everyone)
        tables = own + [[NOWHERE] * 4] * padding
        sizes = {"padded_rows": 2 + padding, "padded_tokens": 2 * (query + padding)}
        logits, plan = host.run(new, [prior] * 2, tables, tables, phase=phase, **sizes)
        assert_made_for_all_rows(plan)
        assert logits.isfinite().all()
        results.append((logits[: 2 * query], host.all_bytes()))
    assert_close(results[1][0], results[0][0])
    same = [before == after for before, after in zip(results[0][1], results[1][1], strict=True)]
    assert all(same[block] for block in range(len(same)) if block % NUM_BLOCKS not in range(1, 9))


@pytest.mark.parametrize(("phase", "query"), [(Phase.DECODE, 1), (Phase.VERIFY, 3)])
def test_a_replay_reads_nothing_for_the_rows_that_its_graph_has_too_many(phase: Phase, query: int) -> None:
    """A graph of five rows, replayed with one: the tables of the others hold ids that no pool has."""
    host, sequence, table = HandMade(), tokens(9 + query), [1, 2, 3, 4]
    graph = Captured(host, 5, phase, query)
    host.run([sequence[:9]], [0], [table], [table])
    before = [host.block_bytes(layer, block) for layer in host.buffers for block in range(5, NUM_BLOCKS)]
    for of_group in graph.tables.values():
        of_group.fill_(NOWHERE)
    logits = graph.replay({"attention": [table], "state": [table]}, [sequence[9:]], [9], strict=True)
    assert_close(logits[:query], host.expected(sequence)[9:])
    assert logits.isfinite().all()
    assert graph.plan.shared.query_start.tolist() == [0] + [query] * 5
    assert torch.equal(graph.plan.shared.context_len, torch.tensor([9 + query, 0, 0, 0, 0], dtype=torch.int32))
    after = [host.block_bytes(layer, block) for layer in host.buffers for block in range(5, NUM_BLOCKS)]
    assert after == before
