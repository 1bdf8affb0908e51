"""The rows of the reference's behaviour, one test each, on all three classes, with numbers computed by hand.

Rows: what ATOM's own bridge does, case by case; where it is wrong, what is right instead. Blocks are of 8 tokens,
kernel blocks of 2 where a row is about them. Three requests stand in most tests: prior 0, 5, 16 tokens; new 3, 4, 1.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from stepbind.errors import BlockFaultError, StepError
from stepbind.groups import GroupKind
from stepbind.targets import atom
from stepbind.targets.atom import api, swap
from tests.targets.atom_double import modules
from tests.targets.atom_double.modules import Ambient, atom_installed
from tests.targets.atom_double.passes import (
    hybrid_model,
    int32,
    latent_model,
    pass_inputs,
    plain_model,
    positions_of,
    runtime_for,
)

PLAIN, LATENT, HYBRID = atom.RTPForwardContext, atom.RTPForwardMLAContext, atom.RTPForwardQwen35HybridContext
MODELS: dict[Any, Callable[..., Any]] = {PLAIN: plain_model, LATENT: latent_model, HYBRID: hybrid_model}
CLASSES = [pytest.param(cls, id=name) for cls, name in ((PLAIN, "plain"), (LATENT, "mla"), (HYBRID, "hybrid"))]
every_class = pytest.mark.parametrize("cls", CLASSES)

QUERY, PRIOR = [3, 4, 1], [0, 5, 16]
TABLE = [[4, 0, 0], [7, 9, 0], [2, 3, 5]]
DECODE_PRIOR = [7, 8, 16]
DECODE_TABLE = [[4, 0, 0], [7, 9, 0], [2, 3, 5]]


@pytest.fixture(autouse=True)
def ambient() -> Iterator[Ambient]:
    with atom_installed() as state:
        yield state


class Case:
    """A pass through one class."""

    def __init__(self, cls: Any, inputs: Any, positions: torch.Tensor, *, ratio: int = 1, blocks: int = 12) -> None:
        self.cls, self.inputs, self.positions = cls, inputs, positions
        self.model = MODELS[cls]()
        self.runtime = runtime_for(self.model, 8, 8 // ratio, blocks)

    @property
    def attention(self) -> Any:
        return self.inputs.attention_inputs

    def arguments(self, **more: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "runtime": self.runtime,
            "inputs": self.inputs,
            "positions": self.positions,
            **more,
        }

    def build(self, **more: Any) -> Any:
        return self.cls.build(**self.arguments(**more))

    def bind(self, **more: Any) -> Any:
        return self.cls.bind(**self.arguments(**more))

    def plugin(self, **more: Any) -> Any:
        return self.build(**more).attn_metadata.plugin_metadata


def prefill(cls: Any, table: Any = TABLE, **more: Any) -> Case:
    sizes = {key: more.pop(key) for key in ("ratio", "blocks") if key in more}
    inputs = pass_inputs(prefill=True, query=QUERY, prior=PRIOR, tables=[table], **more)
    return Case(cls, inputs, positions_of(QUERY, PRIOR), **sizes)


def decode(cls: Any, table: Any = DECODE_TABLE, prior: list[int] = DECODE_PRIOR, **more: Any) -> Case:
    sizes = {key: more.pop(key) for key in ("ratio", "blocks") if key in more}
    inputs = pass_inputs(prefill=False, query=[1] * len(prior), prior=prior, tables=[table], **more)
    return Case(cls, inputs, positions_of([1] * len(prior), prior), **sizes)


def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "capturing", lambda: True)


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


KERNEL = [[16, 17, 18, 19, 0, 0, 0, 0], [28, 29, 30, 31, 36, 37, 38, 39], [8, 9, 10, 11, -1, -1, -1, -1]]


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_row_4_the_physical_table_is_every_fourth_kernel_block_divided_by_four(cls: Any) -> None:
    inputs = pass_inputs(prefill=True, query=[3, 4, 1], prior=[0, 5, 2], tables=[KERNEL])
    case = Case(cls, inputs, positions_of([3, 4, 1], [0, 5, 2]), ratio=4)
    assert case.plugin().block_table.tolist() == [[4, 0], [7, 9], [2, -1]]
    compact = Case(cls, inputs, case.positions, ratio=4)
    compact.attention.kv_cache_kernel_block_id_device = int32([[4, 0, 0], [7, 9, 0], [2, -1, 0]])
    assert compact.plugin().block_table.tolist() == [[4, 0, 0], [7, 9, 0], [2, -1, 0]]
    uneven = Case(cls, inputs, case.positions, ratio=4)
    uneven.runtime.kv_cache.kernel_seq_size_per_block = 3
    with pytest.raises(StepError, match="kernel_seq_size_per_block: got 3, expected a divisor of the block size 8"):
        uneven.build()


def test_row_5_the_indexer_gets_the_table_in_kernel_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = [[4, 0], [7, 9], [2, -1]]
    inputs = pass_inputs(prefill=True, query=[3, 4, 1], prior=[0, 5, 2], tables=[KERNEL], store=store)
    case = Case(LATENT, inputs, positions_of([3, 4, 1], [0, 5, 2]), ratio=4)
    expanded = [[16, 17, 18, 19, 0, 1, 2, 3], *KERNEL[1:]]
    assert case.build().attn_metadata.block_tables.tolist() == expanded
    case = decode(LATENT, KERNEL, [2, 14, 3], ratio=4)
    capture(monkeypatch)
    assert case.build(cg_max_seq_len=16).attn_metadata.block_tables.tolist() == expanded
    # A table of two columns is wide enough for contexts of 4 tokens in kernel blocks of 2, and used as it is.
    assert case.build(cg_max_seq_len=4).attn_metadata.block_tables.tolist() == [[4, 0], [7, 9], [2, -1]]


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_row_6_a_capture_never_takes_the_stores_table(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = [[1, 1, 1]] * 3
    case = decode(cls, store=stale)
    assert case.plugin().block_table.tolist() == stale
    capture(monkeypatch)
    assert case.plugin(cg_max_seq_len=24).block_table.tolist() == DECODE_TABLE
    assert case.plugin(cg_max_seq_len=24).slot_mapping.tolist() == [39, 72, 40]
    case = decode(cls, KERNEL, [2, 14, 3], ratio=4, store=[[1, 1]] * 3)
    assert case.plugin(cg_max_seq_len=16).block_table.tolist() == [[4, 0], [7, 9], [2, -1]]
    assert case.plugin(cg_max_seq_len=16).slot_mapping.tolist() == [34, 78, 19]


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
def test_row_13_all_zero_lengths_are_a_warm_up_that_touches_nothing(cls: Any) -> None:
    case = decode(cls, [[0, 0], [0, 0]], [0, 0])
    case.attention.sequence_lengths_plus_1_device = int32([0, 0])
    for budget, want in ((0, 1), (512, 512)):
        context = case.build(cg_max_seq_len=budget)
        plugin = context.attn_metadata.plugin_metadata
        assert (plugin.is_dummy_warmup, plugin.max_seq_len, plugin.max_query_len) == (True, want, 1)
        assert plugin.slot_mapping.tolist() == [-1, -1]
        if cls is HYBRID:
            assert context.gdn_metadata.non_spec_state_indices_tensor.tolist() == [-1, -1]
            assert context.gdn_metadata.non_spec_state_indices_in_tensor.tolist() == [-1, -1]
    assert not decode(cls).plugin().is_dummy_warmup


@every_class
def test_row_14_the_has_prefix_flag(cls: Any) -> None:
    assert prefill(cls).plugin().rtp_has_prefix is True
    inputs = pass_inputs(prefill=True, query=[3], prior=[0], tables=[[[4]]])
    assert Case(cls, inputs, positions_of([3], [0])).plugin().rtp_has_prefix is False
    assert decode(cls).plugin().rtp_has_prefix is False


@every_class
def test_row_15_layers_are_found_by_class_and_number(cls: Any) -> None:
    model = torch.nn.ModuleList(
        [
            modules.GatedDeltaNet(0),
            modules.PagedAttention(impl_layer_num=1),
            modules.PagedAttention(2),
            modules.PagedAttentionImpl(3),
            modules.AttentionForRTPLLM(4),
            modules.SparseMLA(5),
            modules.RTPMLAAttention(6),
            modules.PagedAttention(None),
            torch.nn.Linear(1, 1),
        ]
    )
    gdn, paged, latent = cls.collect_layer_maps(model)
    assert {number: type(module).__name__ for number, module in gdn.items()} == {0: "GatedDeltaNet"}
    assert sorted(paged) == [1, 2, 3, 4]
    assert latent[5] is model[5]  # the outer module is the owner, not the attention inside
    assert latent[6] is model[6]


def test_row_16_states_are_views_into_the_raw_block() -> None:
    """4 value heads of 8 x 8, then 3 inputs of 64 channels, in blocks of 453 elements."""
    case = decode(HYBRID)
    base = case.runtime.kv_cache.get_layer_cache(0).kv_cache_base
    base[7] = torch.arange(453)
    tensor = case.build().kv_cache_data["layer_0"]
    assert tensor.v_cache.shape == (12, 4, 8, 8)
    assert tensor.v_cache[7, 1, 2, 3] == 64 + 16 + 3
    assert tensor.k_cache.shape == (12, 64, 3)
    assert tensor.k_cache[7, 5, 2] == 256 + 2 * 64 + 5
    case.runtime.kv_cache.get_layer_cache(1).kv_cache_base = torch.zeros(12, 447)
    with pytest.raises(StepError, match=r"layer 1 state buffer: got 1788 bytes a block, expected at least 1792: 1024"):
        case.build()


def test_row_16_states_of_two_dtypes_lie_at_byte_offsets() -> None:
    case = decode(HYBRID)
    for layer in (0, 1, 2):
        case.runtime.kv_cache.get_layer_cache(layer).kv_cache_base = torch.zeros(12, 1024 + 384 + 16, dtype=torch.uint8)
        case.model[layer].conv1d.weight.data = case.model[layer].conv1d.weight.data.bfloat16()
    tensor = case.build().kv_cache_data["layer_1"]
    assert (tensor.v_cache.dtype, tensor.k_cache.dtype) == (torch.float32, torch.bfloat16)
    assert tensor.k_cache.data_ptr() - tensor.v_cache.data_ptr() == 1024
    assert tensor.k_cache.shape == (12, 64, 3)


@every_class
def test_row_17_attention_and_mla_layers_get_the_hosts_cache_as_it_is(cls: Any) -> None:
    case = decode(cls)
    layer = 3 if cls is HYBRID else 1
    cache = case.runtime.kv_cache.get_layer_cache(layer)
    assert case.build().kv_cache_data[f"layer_{layer}"].k_cache is cache
    for base, message in ((None, "got none"), (torch.tensor(1.0), "got a tensor of no dimensions")):
        cache.kv_cache_base = base
        with pytest.raises(StepError, match=f"layer {layer} kv_cache_base: {message}"):
            case.build()


@every_class
def test_row_18_views_are_kept_while_the_buffers_are_the_same(cls: Any) -> None:
    case = decode(cls)
    first = case.build().kv_cache_data
    assert case.build().kv_cache_data is first
    assert case.runtime._rtp_kv_cache_data is first
    cache = case.runtime.kv_cache.get_layer_cache(0)
    base = cache.kv_cache_base
    changes = [
        base.clone(),  # another pointer
        base.view(torch.int32),  # another dtype
        base.as_strided((12, *base.shape[1:]), (base.stride(0) // 2, *base.stride()[1:])),  # another stride
        torch.zeros(24, *base.shape[1:])[12:],  # an offset
    ]
    for changed in changes:
        cache.kv_cache_base = changed
        again = case.build(strict=False).kv_cache_data
        assert again is not first
        first = again
    in_place = cache.kv_cache_base
    in_place.resize_(11, *base.shape[1:])
    again = case.build(strict=False).kv_cache_data
    assert again is not first
    in_place.as_strided_((10, *base.shape[1:]), (base.stride(0) + 1, *base.stride()[1:]))
    assert case.build(strict=False).kv_cache_data is not again


@every_class
def test_row_19_the_group_map_is_kept_by_content(cls: Any) -> None:
    tables = [DECODE_TABLE, [[1, 0, 0], [6, 8, 0], [3, 10, 11]]]
    inputs = pass_inputs(prefill=False, query=[1, 1, 1], prior=DECODE_PRIOR, tables=tables, layer_to_group=[1, 1, 0, 0])
    case = Case(cls, inputs, int32(DECODE_PRIOR))
    assert case.build().layer_group_map == case.runtime._rtp_layer_group_map == {0: 1, 1: 1, 2: 0, 3: 0}
    case.attention.kv_cache_layer_to_group[1] = 0  # in place: the same pointer and size
    context = case.build()
    assert context.layer_group_map == {0: 1, 1: 0, 2: 0, 3: 0}
    assert sorted({(group.number, group.layers) for group in context.attn_metadata.rtp_groups})[0][0] == 0


@pytest.mark.parametrize("per_thread", [True, False], ids=["context-per-thread", "one-context"])
@every_class
def test_row_20_bind_sets_and_restores(cls: Any, per_thread: bool, ambient: Ambient) -> None:
    if not per_thread:  # an ATOM that keeps no context for each thread
        del sys.modules["atom.utils.forward_context"]._forward_context_local
    case, other = decode(cls), prefill(cls)
    ambient.set_kv_cache_data({"before": 1})
    with case.bind():
        outer = ambient.get_forward_context()
        assert outer.attn_metadata.gdn_metadata is (None if cls is not HYBRID else outer.attn_metadata.gdn_metadata)
        assert outer.kv_cache_data is ambient.caches.kv_cache_data is case.runtime._rtp_kv_cache_data
        assert outer.num_tokens == 3
        assert outer.context.batch_size == 3
        assert outer.attn_metadata.rtp_attn_inputs is case.attention
        with other.bind():
            assert ambient.get_forward_context().num_tokens == 8
        again = ambient.get_forward_context()
        assert again.attn_metadata is outer.attn_metadata
        assert again.kv_cache_data is outer.kv_cache_data
    assert ambient.get_forward_context().attn_metadata is None
    assert ambient.caches.kv_cache_data == {"before": 1}


def test_row_20_mla_layers_have_their_caches_inside_and_what_was_there_afterwards() -> None:
    case = decode(LATENT)
    inner, indexer = case.model[1].mla_attn, case.model[1].indexer
    with case.bind():
        assert inner.kv_cache is case.runtime.kv_cache.get_layer_cache(1)
        keys = indexer.k_cache.kv_cache[0]
        assert keys.shape == (12 * 8, 1, 144)  # 128 + 4, rounded up to 16
        assert keys.dtype == torch.float8_e4m3fn
    assert inner.kv_cache == "before"
    assert indexer.k_cache.kv_cache == ["before"]
    with pytest.raises(ZeroDivisionError), case.bind():
        assert 1 // (indexer.k_cache.kv_cache[0] is not keys)  # the same keys again; and an error in the forward
    assert inner.kv_cache == "before"
    assert indexer.k_cache.kv_cache == ["before"]


@every_class
def test_row_20_threads_do_not_see_each_others_context(cls: Any, ambient: Ambient) -> None:
    case, other = decode(cls), prefill(cls)
    bound, checked, seen = threading.Event(), threading.Event(), []

    def run() -> None:
        with other.bind():
            bound.set()
            checked.wait(10)
            seen.append(ambient.get_forward_context().num_tokens)

    thread = threading.Thread(target=run)
    with case.bind():
        thread.start()
        bound.wait(10)
        assert ambient.get_forward_context().num_tokens == 3
        checked.set()
        thread.join()
        assert ambient.get_forward_context().num_tokens == 3
    assert seen == [8]


def drop(*names: str) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        for name in names:
            setattr(case.attention, name, None)

    return change


def put(name: str, value: Any) -> Callable[[Case], None]:
    return lambda case: setattr(case.attention, name, value)


def no_cache(case: Case) -> None:
    case.runtime.kv_cache = None


def no_inputs(case: Case) -> None:
    case.inputs.attention_inputs = None


def bad_size(case: Case) -> None:
    case.runtime.kv_cache.seq_size_per_block = 0


def bad_group(case: Case) -> None:
    case.attention.kv_cache_kernel_block_id_device_by_group = [int32(DECODE_TABLE)] * 2
    case.attention.kv_cache_layer_to_group = int32([0, 5, 0, 0])


def more_tokens(case: Case) -> None:
    case.positions = torch.arange(5, dtype=torch.int32)


BAD: list[tuple[Callable[..., Case], Callable[[Case], None], str]] = [
    (decode, no_inputs, "inputs.attention_inputs: got none, expected attention inputs"),
    (decode, no_cache, "runtime.kv_cache: got none, expected an initialized cache"),
    (decode, drop("input_lengths"), "attention_inputs.input_lengths: got none, expected one length for each row"),
    (
        decode,
        drop("sequence_lengths", "sequence_lengths_plus_1_device"),
        "attention_inputs.sequence_lengths: got none, expected one for each row",
    ),
    (prefill, drop("prefix_lengths", "prefix_lengths_device"), "prefix_lengths: got none, expected one for each row"),
    (prefill, put("prefix_lengths", int32([1])), "attention_inputs.prefix_lengths: got 1 rows, expected 3 rows"),
    (decode, put("sequence_lengths_plus_1_device", int32([1, 2])), "plus_1_device: got 2 rows, expected 3 rows"),
    (decode, bad_group, r"kv_cache_layer_to_group\[1\]: got 5, expected a group number, 0 .. 1"),
    (decode, drop("kv_cache_kernel_block_id_device"), "kv_cache_kernel_block_id_device: got none, expected a block"),
    (
        decode,
        put("kv_cache_kernel_block_id_device", torch.empty(0, 3, dtype=torch.int32)),
        r"got shape \(0, 3\), expected a block table",
    ),
    (
        decode,
        put("kv_cache_kernel_block_id_device", int32([[1, 2]])),
        r"got shape \(1, 2\), expected \[3 rows as in input_lengths",
    ),
    (decode, bad_size, "kv_cache.seq_size_per_block: got 0, expected at least 1 token"),
    (decode, more_tokens, "positions: got 5 tokens, expected as many as the lengths of 3 rows say"),
]


@pytest.mark.parametrize(("make", "change", "message"), BAD)
@every_class
def test_row_21_errors_name_field_got_and_expected_and_leave_nothing_bound(
    cls: Any, make: Callable[..., Case], change: Callable[[Case], None], message: str, ambient: Ambient
) -> None:
    case = make(cls)
    change(case)
    with pytest.raises(StepError, match=message) as caught, case.bind():
        raise AssertionError("bound")
    assert isinstance(caught.value, ValueError)
    assert ambient.get_forward_context().attn_metadata is None
    assert ambient.caches.kv_cache_data is None
    if cls is LATENT:
        assert case.model[0].mla_attn.kv_cache == "before"
        assert case.model[0].indexer.k_cache.kv_cache == ["before"]


@every_class
def test_row_22_a_capture_needs_no_buffers_of_the_callers(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(monkeypatch)
    plugin = decode(cls).plugin(cg_max_seq_len=24)
    assert (plugin.max_query_len, plugin.max_seq_len, plugin.num_actual_kv_tokens) == (1, 24, 72)
    assert plugin.query_start_loc.tolist() == [0, 1, 2, 3]
    with pytest.raises(StepError, match="cg_max_seq_len: got 0, expected the longest context of a replay"):
        decode(cls).build()
    with pytest.raises(StepError, match="is_prefill: got a prefill pass in a capture"):
        prefill(cls).build(cg_max_seq_len=24)


@every_class
def test_row_22_captured_tensors_follow_what_replay_refreshes(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured with four rows; replayed on two, of which only the live ones' lengths and tables are refreshed."""
    case = decode(cls, [[4, 0], [7, 9], [2, 3], [5, 6]], [3, 8, 9, 15])
    capture(monkeypatch)
    captured = case.build(cg_max_seq_len=16)
    metadata = captured.attn_metadata
    pointers = metadata.slot_mapping.data_ptr(), metadata.context_lens.data_ptr()
    case.attention.kv_cache_kernel_block_id_device.copy_(int32([[7, 9], [2, 0], [0, 0], [0, 0]]))
    case.attention.sequence_lengths_plus_1_device[:2] = int32([9, 6])  # the others keep 10 and 16
    again = case.build(cg_max_seq_len=16).attn_metadata  # the captured operations, on the captured buffers
    assert (again.slot_mapping.data_ptr(), again.context_lens.data_ptr()) == pointers
    assert metadata.slot_mapping.tolist() == [72, 21, -1, -1]
    assert metadata.context_lens.tolist() == [9, 6, 0, 0]
    if cls is HYBRID:
        assert captured.gdn_metadata.non_spec_state_indices_tensor.tolist() == [9, 2, -1, -1]
        assert captured.gdn_metadata.non_spec_state_indices_in_tensor.tolist() == [7, 2, -1, -1]


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


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_row_24_a_compact_table_whose_columns_divide_is_not_squeezed_again(cls: Any) -> None:
    """Four physical columns, four kernel blocks in each: 30 tokens of context would not fit four kernel blocks of 2."""
    inputs = pass_inputs(prefill=True, query=[2], prior=[28], tables=[[[4, 7, 9, 5]]])
    case = Case(cls, inputs, positions_of([2], [28]), ratio=4)
    assert case.plugin().block_table.tolist() == [[4, 7, 9, 5]]
    assert case.plugin().slot_mapping.tolist() == [44, 45]


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_row_24_what_stays_ambiguous_is_an_error(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [[4, 7, 9, 5]]
    case = Case(cls, pass_inputs(prefill=False, query=[1], prior=[3], tables=[table], store=table), int32([3]), ratio=4)
    assert case.plugin().slot_mapping.tolist() == [35]  # eagerly the store's table tells
    capture(monkeypatch)
    with pytest.raises(StepError, match="got 4 columns, as many as the physical table"):
        case.build(cg_max_seq_len=32)


@every_class
def test_row_25_a_cpu_build_of_torch_is_enough(cls: Any) -> None:
    assert api.capturing() is False
    decode(cls).build()


def test_install_puts_the_classes_in_the_references_place(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge, user = ModuleType(swap.BRIDGE), ModuleType("atom.plugin.rtpllm.models.qwen3_5")
    for module in (bridge, user):
        for name in swap.OURS:
            setattr(module, name, getattr(bridge, name, type(name, (), {})))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    theirs = {name: getattr(bridge, name) for name in swap.OURS}
    atom.install()
    atom.install()
    for module in (bridge, user):
        assert {name: getattr(module, name) for name in swap.OURS} == swap.OURS
    atom.uninstall()
    for module in (bridge, user):
        assert {name: getattr(module, name) for name in swap.OURS} == theirs


def test_without_atom_the_target_says_what_is_missing() -> None:
    case = decode(PLAIN)
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "atom" or name.startswith("atom.")}
    try:
        with pytest.raises(ImportError, match="hands passes to ATOM's layers and needs ATOM"):
            case.build()
    finally:
        sys.modules.update(saved)
