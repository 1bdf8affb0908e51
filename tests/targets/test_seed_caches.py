"""The rows of the reference's behaviour on layers and their caches: which there are, and the views of their buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepbind.errors import StepError
from tests.targets.atom_double import modules
from tests.targets.atom_double.case import (
    DECODE_PRIOR,
    DECODE_TABLE,
    HYBRID,
    Case,
    decode,
    every_class,
)
from tests.targets.atom_double.modules import Ambient, atom_installed
from tests.targets.atom_double.passes import int32, pass_inputs


@pytest.fixture(autouse=True)
def ambient() -> Iterator[Ambient]:
    with atom_installed() as state:
        yield state


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
    cache.kv_cache_base.resize_(11, *base.shape[1:])  # in place
    assert case.build(strict=False).kv_cache_data is not first


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
