"""With several groups, the second group's metadata still points at the first group's buffers.
Guards: both fills write each group's values to its own buffers, and context.Context gives a layer its own group's."""

from __future__ import annotations

import itertools

import pytest
import torch

from stepbind import CacheGroup, GroupKind, Phase
from stepbind.plan import PagedPlan, StatePlan, build_plan, make_arena
from stepbind.plan.plan import GroupPlan
from stepbind.plan.reference import reference_plan
from stepbind.step import make_step
from tests.plan.test_fill import assert_group_equals_reference
from tests.zoo.captured import Captured
from tests.zoo.harness import FILLS, NUM_BLOCKS, HandMade, assert_close, tokens

KINDS = (GroupKind.ATTENTION, GroupKind.STATE) * 2
GROUPS = tuple(
    CacheGroup(f"group{index}", kind, (layer,), size, size, NUM_BLOCKS)
    for index, (kind, layer, size) in enumerate(zip(KINDS, (1, 0, 3, 2), (8, 8, 4, 16), strict=True))
)


def tables_of(row: int) -> dict[str, list[int]]:
    """The row's blocks in each group: no two groups have the same in any column."""
    return {group.name: [1 + 5 * row + (column + 2 * n) % 5 for column in range(5)] for n, group in enumerate(GROUPS)}


def tables_by_group(rows: list[int]) -> dict[str, list[list[int]]]:
    return {group.name: [tables_of(row)[group.name] for row in rows] for group in GROUPS}


def test_every_layer_works_on_its_own_groups_blocks_in_every_replay() -> None:
    host = HandMade(groups=GROUPS)
    graph = Captured(host, 3)
    sequences = [tokens(length + 3, seed=length) for length in (4, 9, 14, 15)]
    start = [len(sequence) - 3 for sequence in sequences]
    for row, sequence in enumerate(sequences):
        host.run_on(tables_by_group([row]), [sequence[:-3]], [0])
    for rows in ([0, 1, 2], [2, 0], [3, 1]):
        at = [start[row] for row in rows]
        new = [[sequences[row][position]] for row, position in zip(rows, at, strict=True)]
        logits = graph.replay(tables_by_group(rows), new, at)
        for index, row in enumerate(rows):
            assert_close(logits[index], host.expected(sequences[row])[start[row]])
            start[row] += 1


@pytest.mark.parametrize("triton", FILLS)
def test_a_group_whose_table_moved_is_the_only_one_that_changes(triton: bool) -> None:
    """On a kept plan, as a graph keeps it, with the host's tables refreshed in place one after the other."""
    tables = {name: torch.tensor(blocks, dtype=torch.int32) for name, blocks in tables_by_group([0, 1, 2]).items()}
    arena = make_arena(GROUPS, max_rows=3, max_tokens=3, max_context=20)

    def fill() -> tuple[GroupPlan, ...]:
        step = make_step(GROUPS, Phase.DECODE, [1, 1, 1], [4, 16, 19], tables)
        return build_plan(step, arena, triton=triton).groups

    kept = fill()
    for moved in GROUPS:
        before = [slots_of(group) for group in kept]
        tables[moved.name] += 1
        fill()
        after = [slots_of(group) for group in kept]
        assert [group for group, b, a in zip(GROUPS, before, after, strict=True) if a != b] == [moved]
        step = make_step(GROUPS, Phase.DECODE, [1, 1, 1], [4, 16, 19], tables)
        if not triton:
            for group, want in zip(kept, reference_plan(step).groups, strict=True):
                assert_group_equals_reference(group, want)


def slots_of(group: GroupPlan) -> list[list[int]]:
    if isinstance(group, PagedPlan):
        return [group.slot.tolist()]
    return [group.state_read.tolist(), group.state_write.tolist()]


def test_no_two_groups_share_memory() -> None:
    arena = make_arena(GROUPS, max_rows=3, max_tokens=8, max_context=20)
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for group in arena.groups
        for tensor in tensors_of(group)
    )
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def tensors_of(group: GroupPlan) -> list[torch.Tensor]:
    if isinstance(group, StatePlan):
        kept = group.snapshots
        return [group.state_read, group.state_write, kept.row, kept.offset, kept.slot]
    return [group.slot, group.block_table]
