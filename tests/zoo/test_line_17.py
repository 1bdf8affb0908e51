"""Zoo line 17: a table that replay does not refresh is baked into the graph (note in the reference file).

A graph holds the tensors of the pass it was captured with. Here one pass's tensors are kept, the host refreshes its one
table in place, the arena is filled again, and the kept tensors must say what a new plan says.

Checked by taking out, one at a time, in `_fill_paged` of plan/fill_torch.py: the `_store_table` of the physical table,
that of the kernel table, and `group_plan.slot[:tokens] = ...`; the two stores of state slots in `_fill_state`; and the
table that hosts/rtp_llm/reader.py reads.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stepbind.ops.latent_attention import latent_attention, sparse_latent_attention
from stepbind.plan import build_plan, make_arena
from stepbind.plan.reference import reference_plan
from stepbind.step import Granularity, Phase, Step, make_step
from tests.hosts.rtp_double.by_hand import Host, expected
from tests.hosts.rtp_double.graphs import POISON, GraphRunner
from tests.hosts.rtp_double.inputs import GENERATIONS, Row
from tests.ops.latent_case import LatentCase, fill_context, latent_case, nan_pages
from tests.plan.test_fill import assert_group_equals_reference
from tests.zoo.captured import Captured
from tests.zoo.harness import NUM_BLOCKS, HandMade, assert_close, tokens


def replayed(granularity: Granularity) -> tuple[LatentCase, Step]:
    """A case on a kept plan, after the host moved every row to other blocks and the arena was filled a second time;
    and that second step. All of the case's memory is NaN."""
    case = next(c for c in (latent_case(seed, holes=False) for seed in range(1000)) if suits(c))
    plan, sizes, shared = case.group_plan, case.plan.sizes, case.plan.shared
    group = dataclasses.replace(plan.group, num_blocks=2 * plan.group.num_blocks)
    assert plan.physical_table is not None
    table = (plan.physical_table if granularity is Granularity.PHYSICAL else plan.block_table).clone()

    def step() -> Step:
        query, prior = shared.query_len[: sizes.num_rows].tolist(), shared.prior_len[: sizes.num_rows].tolist()
        padded = {"padded_rows": sizes.padded_rows, "padded_tokens": sizes.padded_tokens}
        return make_step([group], sizes.phase, query, prior, {"latent": table}, granularity=granularity, **padded)

    arena = make_arena([group], max_rows=9, max_tokens=64, max_context=64)
    kept = build_plan(step(), arena)
    moved = group.num_blocks // 2 * (group.ratio if granularity is Granularity.KERNEL else 1)
    table += torch.where(table >= 0, moved, 0).int()
    build_plan(step(), arena)
    return dataclasses.replace(case, plan=kept, pages=nan_pages(group)), step()


def suits(case: LatentCase) -> bool:
    sizes = case.plan.sizes
    return sizes.num_rows > 2 and sizes.max_query > 3 and case.group_plan.group.ratio > 1


@pytest.mark.parametrize("granularity", list(Granularity))
def test_the_tensors_of_a_kept_plan_follow_the_hosts_table(granularity: Granularity) -> None:
    case, step = replayed(granularity)
    assert_group_equals_reference(case.group_plan, reference_plan(step).groups[0])


@pytest.mark.parametrize("granularity", list(Granularity))
def test_attention_on_a_kept_plan_reads_the_blocks_that_the_rows_have_now(granularity: Granularity) -> None:
    case, step = replayed(granularity)
    fresh = build_plan(step, make_arena(step.groups, max_rows=9, max_tokens=64, max_context=64))
    fill_context(dataclasses.replace(case, plan=fresh))  # what the rows had before stays NaN
    plan, shared, sizes = case.group_plan, case.plan.shared, case.plan.sizes
    first = torch.where(shared.row_of_token >= 0, 0, -1).int()[:, None]
    dense = latent_attention(case.query, case.weight, case.pages, plan, shared, sizes, 1.0)
    sparse = sparse_latent_attention(case.query, case.weight, case.pages, first, plan, shared, 1.0)
    for out in (dense, sparse):
        assert out.isfinite().all()
        assert out[shared.row_of_token >= 0].all()


def test_a_graph_over_attention_and_state_follows_rows_that_move_and_change_places() -> None:
    """Two sequences, their blocks moved by the host between replays and their rows swapped: the old blocks are NaN."""
    host, sequences = HandMade(), [tokens(16, seed=row) for row in range(2)]
    graph, tables = Captured(host, 2), [[1, 2], [3, 4]]
    host.run([each[:5] for each in sequences], [0, 0], tables, tables)
    order = [0, 1]
    for position in range(5, 16):
        moved = [[(block + 2) % (NUM_BLOCKS - 1) + 1 for block in table] for table in reversed(tables)]
        for buffer in host.buffers.values():
            blocks = buffer.view(torch.int8).reshape(NUM_BLOCKS, -1)
            kept = blocks.clone()
            blocks.fill_(-1)
            for old, new in zip(reversed(tables), moved, strict=True):
                blocks[new] = kept[old]
        tables, order = moved, order[::-1]
        both = {"attention": tables, "state": tables}
        logits = graph.replay(both, [[sequences[row][position]] for row in order], [position] * 2)
        for index, row in enumerate(order):
            assert_close(logits[index], host.expected(sequences[row])[position])


@pytest.mark.parametrize("generation", GENERATIONS)
def test_rtps_graphs_read_no_table_of_the_cache_store(generation: str) -> None:
    """Replay leaves those as they were at capture: full of ids that no pool has."""
    host, sequence = Host(generation), tokens(20)
    graphs = GraphRunner(host, host.layout, [2], 32)
    tables = [[5, 6, 7], [1, 2, 3]]
    host.run(host.inputs(Phase.PREFILL, [Row(sequence[:6], 0, tables)]))
    for position in range(6, 20):
        got = graphs.replay([Row([sequence[position]], position, tables)])
        assert_close(got[0], expected(sequence)[position])
    assert all((store == POISON).all() for store in graphs.stores)
