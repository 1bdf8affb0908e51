"""Slot -1 used as an index: the last slot of the cache is overwritten.
Guards: `slot >= 0` in cache_write.write_kv and in causal_conv's and gated_delta's writes."""

from __future__ import annotations

from stepbind import Phase
from tests.zoo.harness import NUM_BLOCKS, HandMade, tokens


def test_padding_and_missing_blocks_leave_the_last_slot_alone() -> None:
    host = HandMade()
    last = NUM_BLOCKS - 1
    before = [host.block_bytes(layer, last) for layer in host.buffers]
    host.run([tokens(5)], [0], [[1]], [[1]], padded_rows=3, padded_tokens=9)
    host.run([tokens(5)], [0], [[-1]], [[-1]], strict=False)
    host.run([[7]], [5], [[-1]], [[-1]], phase=Phase.DECODE, padded_rows=3, padded_tokens=3, strict=False)
    assert [host.block_bytes(layer, last) for layer in host.buffers] == before
