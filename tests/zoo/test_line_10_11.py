"""Dummy passes write state through rows left by finished requests, or NaN into the null block that padding reads.
Guards: fill_torch `state_write[rows:] = -1`, and -1 for the slots of a dummy's tokens."""

from __future__ import annotations

import pytest

from stepbind import Phase
from tests.zoo.harness import HandMade, tokens


@pytest.mark.parametrize("phase", list(Phase))
def test_a_dummy_pass_changes_no_byte(phase: Phase) -> None:
    host = HandMade()
    tables = [[row + 1] for row in range(4)]
    host.run([tokens(5, seed=row) for row in range(4)], [0] * 4, tables, tables)
    before = host.all_bytes()
    logits, plan = host.run([[], []], [0, 0], [[0], [0]], [[0], [0]], phase=phase, padded_rows=4, padded_tokens=6)
    assert plan.sizes.is_dummy
    assert logits.isfinite().all()
    assert host.all_bytes() == before
