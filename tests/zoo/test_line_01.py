"""One slot for reading and writing the state: every prefix hit, resumed chunk and block boundary continues from
another block's content. Guard: fill_torch `group_plan.state_read[:rows] = read`."""

from __future__ import annotations

from stepbind import Phase
from tests.zoo.harness import HandMade, assert_close, tokens


def test_a_prefix_hit_continues_from_the_shared_blocks_and_leaves_them_alone() -> None:
    host, shared = HandMade(), tokens(20)
    host.run([shared], [0], [[1, 2, 3]], [[1, 2, 3]])
    before = [host.block_bytes(layer, block) for layer in host.buffers for block in (1, 2, 3)]
    other = shared[:16] + tokens(7, seed=1)  # the first two blocks are the same
    logits, _ = host.run([other[16:]], [16], [[1, 2, 9]], [[1, 2, 9]])
    assert_close(logits, host.expected(other)[16:])
    assert [host.block_bytes(layer, block) for layer in host.buffers for block in (1, 2, 3)] == before


def test_a_resumed_chunk_continues_from_the_last_chunks_block() -> None:
    host, prompt = HandMade(), tokens(24)
    host.run([prompt[:11]], [0], [[1, 2, 3]], [[-1, 2, -1]])
    logits, _ = host.run([prompt[11:]], [11], [[1, 2, 3]], [[-1, 2, 3]])
    assert_close(logits, host.expected(prompt)[11:])


def test_decode_continues_over_every_boundary() -> None:
    host, sequence = HandMade(), tokens(30)
    table = [[1, 2, 3, 4]]
    host.run([sequence[:6]], [0], table, table)
    for position in range(6, 30):
        logits, _ = host.run([[sequence[position]]], [position], table, table, phase=Phase.DECODE)
        assert_close(logits[0], host.expected(sequence)[position])
