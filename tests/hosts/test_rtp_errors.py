"""Bad input from RTP is named, and leaves nothing bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepbind.context import current
from stepbind.errors import NotBoundError, StepError
from stepbind.hosts.rtp_llm import read_memory
from stepbind.step import Phase
from tests.hosts.rtp_double.by_hand import Host, each
from tests.hosts.rtp_double.inputs import ModelInputs, Row, int32


# Bad input: (what a test does to good inputs or to the cache, the error).
def drop(name: str) -> Any:
    return lambda host, inputs: [setattr(attention, name, None) for attention in each(inputs)]


def replace(name: str, value: Any) -> Any:
    return lambda host, inputs: [setattr(attention, name, value) for attention in each(inputs)]


def both(*changes: Any) -> Any:
    return lambda host, inputs: [change(host, inputs) for change in changes]


def bad_group(host: Host, inputs: ModelInputs) -> None:
    each(inputs)[0].kv_cache_layer_to_group = int32([0, 2])


def no_buffer(host: Host, inputs: ModelInputs) -> None:
    host.cache.get_layer_cache(1).kv_cache_base = None


def scalar_buffer(host: Host, inputs: ModelInputs) -> None:
    host.cache.get_layer_cache(1).kv_cache_base = torch.tensor(1.0)


def bad_block_size(host: Host, inputs: ModelInputs) -> None:
    host.cache.seq_size_per_block = 0


BAD: list[tuple[str, Phase, Any, str]] = [
    (
        "older",
        Phase.DECODE,
        lambda host, inputs: setattr(inputs, "attention_inputs", None),
        "inputs.attention_inputs: ",
    ),
    ("newer", Phase.DECODE, lambda host, inputs: inputs.attention_inputs.clear(), "inputs.attention_inputs: got none"),
    ("older", Phase.DECODE, both(drop("input_lengths"), drop("input_lengths_device")), "input_lengths: got none, exp"),
    (
        "newer",
        Phase.DECODE,
        both(drop("sequence_lengths"), drop("sequence_lengths_plus_1_device")),
        "sequence_lengths: got none, expected one length for each row",
    ),
    ("older", Phase.PREFILL, both(drop("prefix_lengths"), drop("prefix_lengths_device")), "prefix_lengths: got none"),
    ("older", Phase.PREFILL, replace("prefix_lengths", int32([0])), "prefix_lengths: got 1 rows, expected 2 rows"),
    ("newer", Phase.DECODE, replace("sequence_lengths", int32([1, 1, 1])), "sequence_lengths: got 3 rows, expected 2"),
    (
        "newer",
        Phase.DECODE,
        replace("sequence_lengths_plus_1_device", int32([1])),
        "sequence_lengths_plus_1_device: got 1 rows, expected 2 rows",
    ),
    ("newer", Phase.DECODE, drop("kv_cache_kernel_block_id_device"), "of 'linear': got none, expected a block table"),
    (
        "newer",
        Phase.DECODE,
        replace("kv_cache_kernel_block_id_device", torch.zeros(3, 4, dtype=torch.int32)),
        r"shape \(3, 4\), expected \[2 rows as in input_lengths",
    ),
    (
        "newer",
        Phase.DECODE,
        replace("kv_cache_kernel_block_id_device", torch.zeros(2, 4)),
        "got torch.float32, expected torch.int32",
    ),
    ("older", Phase.DECODE, bad_group, r"kv_cache_layer_to_group\[1\]: got 2, expected a group number, 0 .. 1"),
    ("older", Phase.DECODE, drop("kv_cache_layer_to_group"), "kv_cache_layer_to_group: got none, expected the group"),
    ("older", Phase.DECODE, bad_block_size, "kv_cache.seq_size_per_block: got 0, expected at least 1 token"),
    ("older", Phase.DECODE, no_buffer, "layer 1 kv_cache_base: got none, expected the layer's cache buffer"),
    ("newer", Phase.DECODE, scalar_buffer, "layer 1 kv_cache_base: got a tensor of no dimensions"),
    ("newer", Phase.DECODE, lambda host, inputs: setattr(inputs, "input_ids", None), "inputs.input_ids: got none"),
    (
        "newer",
        Phase.DECODE,
        lambda host, inputs: setattr(inputs, "input_ids", int32([1, 2, 3])),
        "padded_tokens|input_ids: got 3 tokens, expected the 2 that the lengths say",
    ),
]


@pytest.mark.parametrize(("generation", "phase", "change", "message"), BAD)
def test_bad_input_is_named_and_leaves_nothing_bound(generation: str, phase: Phase, change: Any, message: str) -> None:
    host = Host(generation)
    prior = 0 if phase is Phase.PREFILL else 4
    inputs = host.inputs(phase, [Row([1], prior, [[5, 6], [1, 2]]), Row([2], prior, [[7, 8], [3, 4]])])
    forward = host.model.model.layers[0].linear_attn.forward
    change(host, inputs)
    with pytest.raises(StepError, match=message) as caught:
        host.run(inputs)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(NotBoundError):
        current()
    assert host.model.model.layers[0].linear_attn.forward == forward
    assert host.model.config._attn_implementation != "stepbind"


def test_no_cache_is_named() -> None:
    with pytest.raises(StepError, match="kv_cache: got none, expected an initialized cache"):
        read_memory(None, [0])
