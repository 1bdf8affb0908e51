"""Snapshot taken somewhere else than at the exact block boundary its hash stands for.
Guard: fill_torch._fill_snapshots subtracts `prior[row]` from the boundary."""

from __future__ import annotations

import torch

from stepbind.caches import StateSlots
from tests.zoo.harness import HandMade, tokens


def test_a_snapshot_is_the_state_of_exactly_the_blocks_tokens() -> None:
    prompt, host = tokens(30), HandMade()
    table = [[1, 2, 3, 4]]
    host.run([prompt[:5]], [0], table, table)
    host.run([prompt[5:]], [5], table, table)  # passes the boundaries at 8, 16 and 24
    for column, end in enumerate((8, 16, 24)):
        alone = HandMade()
        alone.run([prompt[:end]], [0], table, table)
        for ours, theirs in zip(state_at(host, 1 + column), state_at(alone, 1 + column), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def state_at(host: HandMade, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = host.caches[0]
    assert isinstance(slots, StateSlots)
    return slots.recurrent[block], slots.conv[block]
