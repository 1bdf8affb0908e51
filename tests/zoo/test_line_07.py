"""Slot = request id modulo capacity: two live requests share one. Guard: BlockPool.take removes the block."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from stepbind import CacheGroup, GroupKind, SamplingParams
from stepbind.hosts.local.blocks import BlockManager
from stepbind.hosts.local.request import Sequence

GROUPS = (
    CacheGroup("attention", GroupKind.ATTENTION, (1,), 4, 4, 21),
    CacheGroup("state", GroupKind.STATE, (0,), 8, 8, 9),
)


@given(st.integers(0, 2**32), st.integers(0, 3))
def test_no_block_has_two_owners(seed: int, keep_state_every: int) -> None:
    """Requests come, grow and go at random; at every moment their blocks are theirs alone and none is reserved."""
    rng, blocks = random.Random(seed), BlockManager(GROUPS, keep_state_every)
    live: list[Sequence] = []
    for number in range(60):
        prompt_len, max_tokens = rng.randint(1, 20), rng.randint(1, 20)
        fresh = Sequence(number, prompt_len, [0] * prompt_len, SamplingParams(max_tokens=max_tokens))
        if blocks.admit(fresh):
            live.append(fresh)
        for sequence in list(live):
            query_len = min(rng.randint(1, 9), sequence.max_len - sequence.computed)
            if query_len == 0 or rng.random() < 0.1:
                blocks.release(sequence)
                live.remove(sequence)
                continue
            blocks.extend(sequence, query_len)
            check(live)
            blocks.drop_read_states(sequence, query_len)
            sequence.computed += query_len
            check(live)
    for sequence in live:
        blocks.release(sequence)
    assert [pool.available for pool in blocks.pools] == [pool.capacity for pool in blocks.pools]


def check(live: list[Sequence]) -> None:
    for index, group in enumerate(GROUPS):
        owned = [block for sequence in live for block in sequence.tables[index] if block >= 0]
        assert len(owned) == len(set(owned))
        assert all(group.first_block <= block < group.num_blocks for block in owned)
