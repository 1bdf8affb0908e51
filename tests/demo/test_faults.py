"""The demonstration's faults are what they say, and end with their block."""

from __future__ import annotations

import pytest
import torch

from stepbind import EngineOptions, LocalEngine, SamplingParams, StepError
from stepbind.demo.faults import FAULTS, broken
from stepbind.tiny import tiny_model

PROMPT = [(7 * index) % 250 for index in range(40)]


def generated(**options: object) -> tuple[list[int], torch.Tensor]:
    engine = LocalEngine(tiny_model("qwen3_5"), options=EngineOptions(max_rows=4, **options))  # type: ignore[arg-type]
    with engine:
        [completion] = engine.generate([PROMPT], SamplingParams(max_tokens=40, ignore_eos=True, return_logits=True))
    assert completion.logits is not None
    return completion.tokens, completion.logits


@pytest.mark.parametrize(
    ("fault", "options"),
    [("state", {}), ("slot", {}), ("padding", {"graphs": True, "graph_rows": (4,)})],
    ids=["state", "slot", "padding"],
)
def test_a_fault_changes_what_is_generated_and_nothing_afterwards(fault: str, options: dict[str, object]) -> None:
    right = generated(**options)
    with broken(fault):
        wrong = generated(**options)
    assert (wrong[1] - right[1]).abs().max() > 0.01
    again = generated(**options)
    assert again[0] == right[0]
    torch.testing.assert_close(again[1], right[1])


def test_the_state_fault_shows_no_earlier_than_a_block_boundary() -> None:
    right, _ = generated()
    with broken("state"):
        wrong, _ = generated()
    # The prompt of 40 tokens is one pass; the token at position 48 is the first that reads another block's state.
    assert wrong[: 48 - 40 + 1] == right[: 48 - 40 + 1]


def test_an_unknown_fault_is_refused() -> None:
    with (
        pytest.raises(StepError, match="fault: got 'nothing', expected one of state, slot, padding"),
        broken("nothing"),
    ):
        pass
    assert list(FAULTS) == ["state", "slot", "padding"]
