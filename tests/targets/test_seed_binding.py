"""The rows of the reference's behaviour on binding and its errors; and how the classes take ATOM's place."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from stepbind.errors import StepError
from stepbind.targets import atom
from stepbind.targets.atom import api, swap
from tests.targets.atom_double.case import (
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
from tests.targets.atom_double.passes import int32


@pytest.fixture(autouse=True)
def ambient() -> Iterator[Ambient]:
    with atom_installed() as state:
        yield state


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
    (prefill, drop("prefix_lengths", "prefix_lengths_device"), "prefix_lengths: got none, expected one length for"),
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
