"""The rows of the reference's behaviour on warm-up passes, captures and replays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stepbind.errors import StepError
from tests.targets.atom_double.case import (
    HYBRID,
    capture,
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
