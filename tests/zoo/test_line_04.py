"""A prefill chunk shorter than the convolution width writes its convolution state into the shared prefix block it
read from. Guard: causal_conv stores to `plan.state_write`, with the read state's tail in front of the new tokens."""

from __future__ import annotations

import pytest

from tests.zoo.harness import HandMade, assert_close, tokens


@pytest.mark.parametrize("chunk", [1, 2])
def test_chunks_shorter_than_the_convolution_do_not_touch_the_shared_block(chunk: int) -> None:
    host, prompt = HandMade(), tokens(24)
    host.run([prompt[:16]], [0], [[1, 2]], [[1, 2]])
    shared = host.block_bytes(0, 2)
    for start in range(16, 24, chunk):
        logits, _ = host.run([prompt[start : start + chunk]], [start], [[1, 2, 9]], [[1, 2, 9]])
        assert_close(logits, host.expected(prompt)[start : start + chunk])
    assert host.block_bytes(0, 2) == shared
