"""What is special about usual passes on the CPU: which there are, and what is made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepbind.targets.atom import RTPForwardContext, RTPForwardQwen35HybridContext
from stepbind.targets.atom import context as atom_context
from tests.targets.atom_double.modules import atom_installed
from tests.targets.atom_double.passes import (
    hybrid_model,
    int32,
    pass_inputs,
    plain_model,
    positions_of,
    runtime_for,
)

pytestmark = pytest.mark.usefixtures("compiled_alone")
TABLES = [[[4, 5, 6]], [[7, 8, 9]], [[10, 11, 12]]]
LAYER_TO_GROUP = [1, 2, 1, 0]
PRIOR = 8


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with atom_installed():
        yield


class Usual:
    """Passes of one row and three groups: whether they went the usual way, and what came of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = hybrid_model()
        self.runtime = runtime_for(self.model, 8, 8, 20)
        self.is_usual = False
        usual_pass = atom_context.usual_pass

        def watched(*arguments: Any) -> Any:
            computed = usual_pass(*arguments)
            self.is_usual = computed is not None
            return computed

        monkeypatch.setattr(atom_context, "usual_pass", watched)

    def build(self, inputs: Any, positions: torch.Tensor) -> Any:
        self.is_usual = False
        return RTPForwardQwen35HybridContext.build(self.model, self.runtime, inputs, positions)


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> Usual:
    return Usual(monkeypatch)


def decode() -> Any:
    return pass_inputs(prefill=False, query=[1], prior=[PRIOR], tables=TABLES, layer_to_group=LAYER_TO_GROUP)


def position() -> torch.Tensor:
    return int32([PRIOR])


def test_the_first_pass_finds_the_groups_and_the_next_one_is_usual(usual: Usual) -> None:
    first = usual.build(decode(), position())
    assert not usual.is_usual
    again = usual.build(decode(), position())
    assert usual.is_usual
    assert [str(each) for each in again.attn_metadata.rtp_groups] == [
        str(each) for each in first.attn_metadata.rtp_groups
    ]


def test_a_layer_map_changed_in_place_is_seen(usual: Usual) -> None:
    inputs = decode()
    usual.build(inputs, position())
    assert usual.build(inputs, position()).layer_group_map[1] == 2
    inputs.attention_inputs.kv_cache_layer_to_group[1] = 1
    assert usual.build(inputs, position()).layer_group_map[1] == 1


def test_state_slots_are_those_of_the_pass_whenever_they_are_asked_for(usual: Usual) -> None:
    """Token 8 is the first of the second block; the state before it stands in the first one. The host's next pass
    writes other blocks into the same table."""
    inputs = decode()
    usual.build(inputs, position())
    context = usual.build(inputs, position())
    assert usual.is_usual
    for table in inputs.attention_inputs.kv_cache_kernel_block_id_device_by_group:
        table.fill_(1)
    usual.build(inputs, position())
    written = [
        RTPForwardQwen35HybridContext.state_indices_for_layer(
            attn_inputs=inputs.attention_inputs,
            is_prefill=False,
            device=torch.device("cpu"),
            seq_size_per_block=8,
            layer_num=layer,
            state_indices_cache=context.state_indices_cache,
            layer_group_map=context.layer_group_map,
        ).tolist()
        for layer in (0, 1)
    ]
    assert written == [[8], [11]]
    read = context.gdn_metadata.rtp_state_indices_in_cache
    assert (read[1, False].tolist(), read[2, False].tolist()) == ([7], [10])
    by_number = {group.number: group for group in context.attn_metadata.rtp_groups}
    assert (by_number[1].state_read.tolist(), by_number[2].state_write.tolist()) == ([7], [11])


def test_slots_of_the_other_phase_or_of_no_group_are_none_of_the_pass(usual: Usual) -> None:
    usual.build(decode(), position())
    slots = usual.build(decode(), position()).state_indices_cache
    for key in ((1, True), (3, False)):
        with pytest.raises(KeyError):
            slots[key]


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: setattr(inputs, "cu_seqlens_device", int32([1, 2])),
        lambda inputs: setattr(inputs, "prefix_lengths", int32([2**31 - 2])),
        lambda inputs: delattr(inputs, "cu_seqlens_device"),
        lambda inputs: setattr(inputs, "is_cuda_graph", True),
        lambda inputs: setattr(inputs, "is_target_verify", True),
        lambda inputs: setattr(inputs, "prefix_lengths_device", None),
    ],
)
def test_what_is_not_usual_is_left_to_the_general_way(usual: Usual, change: Any) -> None:
    def prefill() -> Any:
        return pass_inputs(prefill=True, query=[2], prior=[PRIOR], tables=TABLES, layer_to_group=LAYER_TO_GROUP)

    positions = positions_of([2], [PRIOR])
    usual.build(prefill(), positions)
    usual.build(prefill(), positions)
    assert usual.is_usual
    inputs = prefill()
    change(inputs.attention_inputs)
    try:
        usual.build(inputs, positions)
    except ValueError:
        pass
    assert not usual.is_usual


def test_inputs_by_tag_are_usual_too(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, model = Usual(monkeypatch), plain_model()
    runtime = runtime_for(model, 8, 8, 20)

    def build() -> Any:
        attention = pass_inputs(prefill=False, query=[1], prior=[PRIOR], tables=TABLES[:1]).attention_inputs
        inputs = SimpleNamespace(attention_inputs={"full": attention})
        return RTPForwardContext.build(model, runtime, inputs, position())

    build()
    slots = build().attn_metadata.slot_mapping
    assert usual.is_usual
    assert slots.tolist() == [5 * 8]
