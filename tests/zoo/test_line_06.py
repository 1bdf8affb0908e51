"""A preempted and resumed request continues from its dead state. Guards: fill_torch._lookup answers none for column -1,
which is where a request looks that starts again; a resumed one whose state is gone is a fault, not a fresh start."""

from __future__ import annotations

import pytest
import torch

from stepbind import BlockFaultError, EngineOptions, LocalEngine, Phase, SamplingParams
from tests.zoo.harness import HandMade, assert_close, hybrid, tokens


def test_a_request_that_starts_again_in_its_own_blocks_takes_nothing_of_what_it_left_there() -> None:
    """Preempted after 13 tokens, and recomputed in chunks where its states of then still stand."""
    host, sequence, table = HandMade(), tokens(20), [[1, 2, 3]]
    host.run([sequence[:12]], [0], table, table)
    host.run([sequence[12:13]], [12], table, table, phase=Phase.DECODE)
    for start, end in ((0, 3), (3, 11), (11, 13)):
        logits, _ = host.run([sequence[start:end]], [start], table, table)
        assert_close(logits, host.expected(sequence)[start:end])
    for position in range(13, 20):
        logits, _ = host.run([[sequence[position]]], [position], table, table, phase=Phase.DECODE)
        assert_close(logits[0], host.expected(sequence)[position])


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.PREFILL])
def test_a_request_that_resumes_without_its_state_is_a_fault(phase: Phase) -> None:
    """The host kept its attention blocks and gave the state away: zeros instead would be another sequence's state."""
    host, sequence = HandMade(), tokens(13)
    host.run([sequence[:12]], [0], [[1, 2]], [[1, 2]])
    # Token 16 is the first of a block: the pass writes block 3, and reads the state that is gone.
    with pytest.raises(BlockFaultError, match=r"1 in group 'state' \(first in row 0\)"):
        host.run([sequence[12:]], [16], [[1, 2, 3]], [[1, -1, 3]], phase=phase)


def test_a_request_that_an_engine_recomputes_goes_on_as_if_it_had_never_left() -> None:
    """Aborted in the middle of its answer, and added again with what it had by then, twice, as its turn comes between
    other requests that use the blocks in the meantime."""
    model = hybrid()
    options = EngineOptions(block_size=8, token_budget=16, max_rows=2, cache_tokens=64)
    prompt, sampling = tokens(11), SamplingParams(max_tokens=24, ignore_eos=True)
    want = list(prompt)
    with torch.no_grad():
        for _ in range(24):
            want.append(int(model(torch.tensor([want]), use_cache=False).logits[0, -1].argmax()))
    with LocalEngine(model, options=options) as engine:
        got = list(prompt)
        for left in (24, 17):
            request = engine.add(got, SamplingParams(max_tokens=left, ignore_eos=True))
            for _ in range(8):
                engine.step()
            got += engine.abort(request).tokens
            engine.generate([tokens(9, seed=left)], SamplingParams(max_tokens=5, ignore_eos=True))
        got += engine.generate([got], SamplingParams(max_tokens=len(want) - len(got), ignore_eos=True))[0].tokens
    assert sampling.max_tokens == len(got) - len(prompt)
    assert got == want
