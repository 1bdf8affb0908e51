"""A fresh slot's old content taken as initial state of a new request. Guard: fill_torch._lookup answers none for
column -1, which is where a row without prior tokens looks."""

from __future__ import annotations

from tests.zoo.harness import HandMade, assert_close, tokens


def test_a_new_request_does_not_continue_from_what_its_block_held_before() -> None:
    host, first, second = HandMade(), tokens(8), tokens(6, seed=1)
    host.run([first], [0], [[1]], [[1]])
    logits, plan = host.run([second], [0], [[1]], [[1]])
    assert plan.groups[1].state_read.tolist() == [-1]  # type: ignore[union-attr]
    assert_close(logits, host.expected(second))
