"""The rows of the reference's behaviour on lengths, slots and states, one test each, on all three classes, with numbers
computed by hand: what ATOM's own bridge does, case by case; where it is wrong, what is right instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepbind.errors import BlockFaultError
from stepbind.groups import GroupKind
from tests.targets.atom_double.case import (
    CLASSES,
    DECODE_PRIOR,
    DECODE_TABLE,
    HYBRID,
    LATENT,
    PLAIN,
    Case,
    decode,
    every_class,
    prefill,
)
from tests.targets.atom_double.modules import Ambient, atom_installed
from tests.targets.atom_double.passes import int32, pass_inputs, positions_of


@pytest.fixture(autouse=True)
def ambient() -> Iterator[Ambient]:
    with atom_installed() as state:
        yield state


def test_row_1_three_profiles_differ_in_declared_fields() -> None:
    assert (PLAIN.profile.physical_table, LATENT.profile.physical_table, HYBRID.profile.physical_table) == (1, 1, 0)
    assert (PLAIN.profile.expand_table, LATENT.profile.expand_table, HYBRID.profile.expand_table) == (0, 1, 0)
    assert (PLAIN.profile.latent_layers, LATENT.profile.latent_layers, HYBRID.profile.latent_layers) == (0, 1, 0)
    assert prefill(PLAIN).build().gdn_metadata is None
    assert prefill(HYBRID).build().gdn_metadata is not None
    assert sorted(prefill(LATENT).build().mla_layer_map) == [0, 1]


@every_class
def test_row_2_query_start_comes_from_cu_seqlens_unless_they_are_the_placeholder(cls: Any) -> None:
    given, derived = prefill(cls).plugin(), prefill(cls, placeholder=True).plugin()
    assert given.query_start_loc.tolist() == derived.query_start_loc.tolist() == [0, 3, 7, 8]
    assert (given.query_start_loc.dtype, derived.query_start_loc.dtype) == (torch.int32, torch.int64)
    assert decode(cls).plugin().query_start_loc.tolist() == [0, 1, 2, 3]
    longer = prefill(cls)  # cu_seqlens may be longer than B+1
    longer.attention.cu_seqlens_device = int32([0, 3, 7, 8, 8, 8])
    assert longer.plugin().query_start_loc.tolist() == [0, 3, 7, 8]


@every_class
def test_row_3_context_lengths_keep_each_profiles_order_of_fields(cls: Any) -> None:
    case = prefill(cls)
    case.attention.sequence_lengths_plus_1_device = int32([30, 90, 17])  # cumulative over chunks
    from_plus_one = [30, 90, 17] if cls is not HYBRID else [3, 9, 17]
    assert case.build().attn_metadata.context_lens.tolist() == from_plus_one
    assert prefill(cls).build().attn_metadata.context_lens.tolist() == [3, 9, 17]
    case = decode(cls)
    case.attention.input_lengths = int32([1, 1, 1])
    case.attention.sequence_lengths_plus_1_device = int32([8, 9, 17])
    assert case.build().attn_metadata.context_lens.tolist() == [8, 9, 17]
    case.attention.is_cuda_graph = True
    case.attention.input_lengths = int32([2, 2, 2])
    assert case.build().attn_metadata.context_lens.tolist() == ([8, 9, 17] if cls is not HYBRID else [9, 10, 18])
    case.attention.sequence_lengths = torch.empty(0, dtype=torch.int32)
    assert case.build().attn_metadata.context_lens.tolist() == [8, 9, 17]


@every_class
def test_row_7_a_slot_is_block_times_size_plus_offset_and_none_without_a_block(cls: Any) -> None:
    slots = prefill(cls).plugin().slot_mapping
    assert (slots.dtype, slots.tolist()) == (torch.int64, [32, 33, 34, 61, 62, 63, 72, 40])
    missing = prefill(cls, [[4, 0, 0], [7, -1, 0], [2, 3, 5]]).plugin(strict=False).slot_mapping
    assert missing.tolist() == [32, 33, 34, 61, 62, 63, -1, 40]
    with pytest.raises(BlockFaultError, match=r"1 in 'group 0.*, expected a block for every new token"):
        prefill(cls, [[4, 0, 0], [7, -1, 0], [2, 3, 5]]).build()


def test_row_8_states_are_written_to_one_slot_and_read_from_another() -> None:
    """At the first boundary after 8 tokens, and in the resumed rows of a prefill."""
    gdn = decode(HYBRID).build().gdn_metadata
    assert gdn.non_spec_state_indices_tensor.tolist() == [4, 9, 5]
    assert gdn.non_spec_state_indices_in_tensor.tolist() == [4, 7, 3]
    gdn = prefill(HYBRID).build().gdn_metadata
    assert gdn.non_spec_state_indices_tensor.tolist() == [4, 9, 5]
    assert gdn.non_spec_state_indices_in_tensor.tolist() == [-1, 7, 3]
    assert gdn.non_spec_state_indices_in_tensor.dtype == torch.int32


def test_row_8_state_slots_of_each_group_are_kept_by_group_and_phase() -> None:
    tables = [DECODE_TABLE, [[1, 0, 0], [6, 8, 0], [-1, 10, 11]], [[3, 0, 0], [2, 1, 0], [-1, 9, 6]]]
    inputs = pass_inputs(prefill=False, query=[1, 1, 1], prior=DECODE_PRIOR, tables=tables, layer_to_group=[1, 2, 1, 0])
    case = Case(HYBRID, inputs, int32(DECODE_PRIOR))
    context = case.build()
    cache = context.state_indices_cache
    assert {key: value.tolist() for key, value in cache.items()} == {
        (0, False): [4, 9, 5],
        (1, False): [1, 8, 11],
        (2, False): [3, 1, 6],
    }
    read = context.gdn_metadata.rtp_state_indices_in_cache
    assert {key: value.tolist() for key, value in read.items()} == {
        (0, False): [4, 7, 3],
        (1, False): [1, 6, 10],
        (2, False): [3, 2, 9],
    }
    arguments = {"attn_inputs": case.attention, "is_prefill": False, "device": torch.device("cpu")}
    for layer, want in ((0, [1, 8, 11]), (1, [3, 1, 6]), (3, [4, 9, 5])):
        for kept in (cache, None, {}):
            got = HYBRID.state_indices_for_layer(
                **arguments,
                seq_size_per_block=8,
                layer_num=layer,
                state_indices_cache=kept,
                layer_group_map=context.layer_group_map,
            )
            assert got.tolist() == want


@every_class
def test_row_9_nothing_is_clamped_into_somebodys_block(cls: Any) -> None:
    beyond = decode(cls, prior=[7, 8, 24])  # the third row's token is past the table
    with pytest.raises(BlockFaultError, match="entries missing or out of range"):
        beyond.build()
    beyond.attention.is_cuda_graph = True  # the reference clamps here
    context = beyond.build()
    assert context.attn_metadata.slot_mapping.tolist() == [39, 72, -1]
    if cls is HYBRID:
        assert context.gdn_metadata.non_spec_state_indices_tensor.tolist() == [4, 9, -1]
    foreign = decode(cls, [[4, 0, 0], [7, 99, 0], [2, 3, 5]]).build(strict=False)
    assert foreign.attn_metadata.slot_mapping.tolist() == [39, -1, 40]


def test_row_10_initial_states_and_convolution_programs() -> None:
    inputs = pass_inputs(prefill=True, query=[3, 17, 8], prior=[0, 5, 16], tables=[[[4, 0, 0], [7, 9, 8], [2, 3, 5]]])
    gdn = Case(HYBRID, inputs, positions_of([3, 17, 8], [0, 5, 16])).build().gdn_metadata
    assert gdn.has_initial_state.tolist() == [False, True, True]
    programs = gdn.nums_dict[8]
    assert (programs["nums"].tolist(), programs["tot"], programs["mlist_len"]) == ([1, 3, 1], 5, 5)
    assert programs["mlist"].tolist() == [0, 1, 1, 1, 2]
    assert programs["offsetlist"].tolist() == [0, 0, 1, 2, 0]
    assert (gdn.batch_ptr.shape[0], gdn.batch_ptr[:6].tolist()) == (2048, [0, 1, 1, 1, 2, -1])
    assert gdn.token_chunk_offset_ptr[:6].tolist() == [0, 0, 1, 2, 0, -1]
    assert decode(HYBRID).build().gdn_metadata.has_initial_state is None


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_row_11_request_ids_and_causal_spans(cls: Any) -> None:
    metadata = prefill(cls).build().attn_metadata
    assert metadata.plugin_metadata.req_id_per_token.tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert metadata.cu_seqlen_ks.tolist() == [0, 0, 0, 3, 3, 3, 3, 7]
    assert metadata.cu_seqlen_ke.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {metadata.cu_seqlen_ks.dtype, metadata.cu_seqlen_ke.dtype} == {torch.int32}
    metadata = decode(cls).build().attn_metadata
    assert metadata.plugin_metadata.req_id_per_token.tolist() == [0, 1, 2]
    assert metadata.cu_seqlen_ks is None


@every_class
def test_row_12_host_scalars(cls: Any) -> None:
    plugin = prefill(cls).plugin()
    assert (plugin.max_query_len, plugin.max_seq_len, plugin.num_actual_kv_tokens) == (4, 17, 29)
    assert (plugin.num_prefills, plugin.num_prefill_tokens, plugin.num_decodes) == (3, 8, 0)
    assert plugin.decode_metadata is None
    plugin = decode(cls).plugin()
    assert (plugin.max_query_len, plugin.max_seq_len, plugin.num_actual_kv_tokens) == (1, 17, 34)
    assert (plugin.num_decodes, plugin.num_decode_tokens, plugin.num_prefills) == (3, 3, 0)
    assert plugin.decode_metadata.max_seq_len == 17


@every_class
def test_row_14_the_has_prefix_flag(cls: Any) -> None:
    assert prefill(cls).plugin().rtp_has_prefix is True
    inputs = pass_inputs(prefill=True, query=[3], prior=[0], tables=[[[4]]])
    assert Case(cls, inputs, positions_of([3], [0])).plugin().rtp_has_prefix is False
    assert decode(cls).plugin().rtp_has_prefix is False


@every_class
def test_row_23_every_group_has_slots_of_its_own(cls: Any) -> None:
    """The one slot_mapping stays the first group's; the others' stand beside it."""
    tables = [DECODE_TABLE, [[1, 0, 0], [6, 8, 0], [3, 10, 11]]]
    inputs = pass_inputs(prefill=False, query=[1, 1, 1], prior=DECODE_PRIOR, tables=tables, layer_to_group=[0, 1, 1, 1])
    case = Case(cls, inputs, int32(DECODE_PRIOR))
    metadata = case.build().attn_metadata
    assert metadata.slot_mapping.tolist() == [39, 72, 40]
    own = {
        (group.number, layer): group.slot_mapping.tolist()
        for group in metadata.rtp_groups
        for layer in group.layers
        if group.kind is not GroupKind.STATE
    }
    want = {PLAIN: {(0, 0): [39, 72, 40], (1, 1): [15, 64, 88]}, HYBRID: {(1, 3): [15, 64, 88]}}
    assert own == want.get(cls, want[PLAIN])
