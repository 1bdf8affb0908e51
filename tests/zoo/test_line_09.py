"""Slot -1 used as an index: the last slot of the cache is overwritten.
Guards: `slot >= 0` in cache_write, in causal_conv's and gated_delta's reads and writes, and in the kernels' writes."""

from __future__ import annotations

import pytest
import torch

from stepbind import CacheGroup, GroupKind, Phase, Plan, build_plan, make_arena, make_step
from stepbind.caches import KVPages, LatentPages
from stepbind.ops import triton_cache_write, triton_causal_conv, triton_gated_delta
from stepbind.ops.cache_write import write_latent, write_tokens
from stepbind.plan import StatePlan
from tests.zoo.harness import FILLS, NUM_BLOCKS, HandMade, assert_close, tokens


def test_padding_and_missing_blocks_leave_the_last_slot_alone() -> None:
    host = HandMade()
    last = NUM_BLOCKS - 1
    before = [host.block_bytes(layer, last) for layer in host.buffers]
    host.run([tokens(5)], [0], [[1]], [[1]], padded_rows=3, padded_tokens=9)
    host.run([tokens(5)], [0], [[-1]], [[-1]], strict=False)
    host.run([[7]], [5], [[-1]], [[-1]], phase=Phase.DECODE, padded_rows=3, padded_tokens=3, strict=False)
    assert [host.block_bytes(layer, last) for layer in host.buffers] == before


def test_a_row_without_a_state_does_not_start_from_the_last_slot() -> None:
    host, sequence = HandMade(), tokens(7)
    for buffer in host.buffers.values():
        buffer.view(torch.uint8).fill_(0x3F)  # 0.75 or so, as any float
    logits, plan = host.run([sequence], [0], [[1]], [[1]])
    assert plan.groups[1].state_read.tolist() == [-1]  # type: ignore[union-attr]
    assert_close(logits, host.expected(sequence))


def test_latent_pages_are_not_written_at_the_end() -> None:
    pages = LatentPages(torch.zeros(3, 4, 6), torch.zeros(3, 4, 2))
    assert pages.index_key is not None
    slot = torch.tensor([5, -1, -1])
    write_latent(pages, torch.ones(3, 4), torch.ones(3, 2), slot)
    write_tokens(pages.index_key, torch.ones(3, 2), slot)
    for buffer in (pages.latent, pages.index_key):
        assert torch.nonzero(buffer.flatten(0, 1).any(dim=1)).tolist() == [[5]]


# Buffers in the middle of larger ones: an address before the first slot's is one of `before`.
@pytest.mark.skipif(True not in FILLS, reason="needs Triton's interpreter")
def test_the_gpus_ops_write_nothing_before_the_first_slot() -> None:
    state, step = decode_of_three_rows()
    shared, plan = step.shared, step.groups[0]
    assert isinstance(plan, StatePlan)
    assert plan.state_write.tolist() == [2, -1, 3]
    whole = torch.zeros(8, 2, 2, 4, 16)
    before, buffer = whole[:2], whole[2:]
    pages = KVPages(buffer[:, 0], buffer[:, 1])
    triton_cache_write.write_kv(pages, torch.ones(3, 2, 16), torch.ones(3, 2, 16), torch.tensor([9, -1, -1]))
    assert not before.any()
    assert buffer.count_nonzero() == 2 * 2 * 16

    conv = torch.zeros(8, 3, 32)
    triton_causal_conv.causal_conv(torch.ones(3, 32), torch.ones(32, 4), None, conv[2:], plan, shared, False)
    assert torch.nonzero(conv.flatten(1).any(dim=1)).flatten().tolist() == [4, 5]

    recurrent = torch.zeros(8, 2, 16, 16)
    q, k, v = (torch.ones(3, 2, 16) for _ in range(3))
    decay, beta = -torch.ones(3, 2), torch.ones(3, 2)
    arguments = (q, k, v, decay, beta, recurrent[2:], plan, shared, step.sizes)
    triton_gated_delta.recurrent_gated_delta(*arguments)
    assert torch.nonzero(recurrent.flatten(1).any(dim=1)).flatten().tolist() == [4, 5]
    assert state.num_blocks == 6


def decode_of_three_rows() -> tuple[CacheGroup, Plan]:
    """One of which has no block."""
    state = CacheGroup("state", GroupKind.STATE, (0,), 4, 4, 6)
    table = {"state": torch.tensor([[2], [-1], [3]], dtype=torch.int32)}
    step = make_step([state], Phase.DECODE, [1, 1, 1], [0, 0, 0], table)
    return state, build_plan(step, make_arena([state], max_rows=3, max_tokens=3, max_context=4), strict=False)
