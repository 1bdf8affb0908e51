"""Token -> request index beyond the table's rows during warm-up. Guard: fill_torch `out[tokens:] = padding`."""

from __future__ import annotations

from stepbind import Phase
from tests.zoo.harness import HandMade, tokens


def test_no_token_of_a_warm_up_points_at_a_row_that_is_not_there() -> None:
    host = HandMade()
    tables = [[row + 1] for row in range(8)]
    host.run([tokens(3, seed=row) for row in range(8)], [0] * 8, tables, tables)
    logits, plan = host.run([[]], [0], [[0]], [[0]], phase=Phase.PREFILL, padded_tokens=24)
    assert plan.shared.row_of_token.tolist() == [-1] * 24
    assert logits.isfinite().all()
