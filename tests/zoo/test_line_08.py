"""Zero-length padding rows of a full decode graph advance somebody's recurrent state.
Guard: fill_torch `group_plan.state_write[rows:] = -1`."""

from __future__ import annotations

from stepbind import Phase
from tests.zoo.harness import HandMade, assert_close, tokens


def test_padding_rows_advance_nobodys_state() -> None:
    """A larger batch left its slots in the buffers and its blocks in the table's padding rows."""
    host = HandMade()
    sequences = [tokens(6, seed=row) for row in range(4)]
    tables = [[row + 1] for row in range(4)]
    host.run([each[:5] for each in sequences], [0] * 4, tables, tables)
    host.run([each[4:5] for each in sequences], [4] * 4, tables, tables, phase=Phase.DECODE)
    others = [host.block_bytes(layer, block) for layer in host.buffers for block in (2, 3, 4)]
    host.run([sequences[0][:5]], [0], [[1]], [[1]])
    logits, plan = host.run([sequences[0][5:]], [5], tables, tables, phase=Phase.DECODE, padded_rows=4, padded_tokens=4)
    assert [host.block_bytes(layer, block) for layer in host.buffers for block in (2, 3, 4)] == others
    assert_close(logits[0], host.expected(sequences[0])[5])
    assert plan.shared.context_len.tolist() == [6, 0, 0, 0]
