"""State column computed with another group's block size. Guard: fill_torch._fill_state takes `table.group`."""

from __future__ import annotations

from stepbind import Phase
from tests.zoo.harness import HandMade, assert_close, tokens


def test_each_group_divides_by_its_own_block_size() -> None:
    """Attention blocks of 4 tokens beside state blocks of 16: token 20 is in column 5 of one, 1 of the other."""
    host, sequence = HandMade(attention_block=4, state_block=16), tokens(21)
    attention, state = [[1, 2, 3, 4, 5, 6]], [[7, 8]]
    host.run([sequence[:20]], [0], attention, state)
    logits, plan = host.run([sequence[20:]], [20], attention, state, phase=Phase.DECODE)
    assert plan.groups[0].slot.tolist() == [6 * 4]  # type: ignore[union-attr]
    assert plan.groups[1].state_write.tolist() == [8]  # type: ignore[union-attr]
    assert_close(logits[0], host.expected(sequence)[20])
