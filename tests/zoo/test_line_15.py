"""Slots invalidated only after backends copied them into their own metadata.

A plan's slots are final when it is made, and whoever hands them on hands on the plan's own memory. Guards: both the
slots of padding and those without a block are -1 in what `build_plan` returns; ATOM's metadata holds no copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepbind import Phase, Plan
from stepbind.plan import PagedPlan, StatePlan
from tests.targets.atom_double.case import CLASSES, HYBRID, capture, decode
from tests.targets.atom_double.modules import atom_installed
from tests.targets.atom_double.passes import int32
from tests.zoo.harness import NUM_BLOCKS, HandMade, tokens


def slots_of(plan: Plan) -> list[torch.Tensor]:
    slots = []
    for group in plan.groups:
        if isinstance(group, PagedPlan):
            slots.append(group.slot)
        else:
            assert isinstance(group, StatePlan)
            slots += [group.state_read, group.state_write]
    return slots


def sees(host: HandMade, plan: Plan, ids: torch.Tensor) -> list[torch.Tensor]:
    """What a backend copies when the pass is bound, which is what all layers find until its end."""
    copies = [slot.clone() for slot in slots_of(plan)]
    host.forward(plan, ids)
    assert all(torch.equal(copy, slot) for copy, slot in zip(copies, slots_of(plan), strict=True))
    return copies


@pytest.mark.parametrize("missing", [-1, 0, NUM_BLOCKS, 2**31 - 1], ids=["none", "reserved", "beyond", "far beyond"])
def test_what_a_backend_copies_at_once_has_no_slot_of_padding_or_of_a_missing_block(missing: int) -> None:
    """After a pass that left a slot in every row of the buffers."""
    host, everyone = HandMade(), [[row + 1, row + 11] for row in range(8)]
    host.run([tokens(8, seed=row) for row in range(8)], [0] * 8, everyone, everyone)
    host.run([[row] for row in range(8)], [8] * 8, everyone, everyone, phase=Phase.DECODE)
    tables = [[1, 9], [2, missing], [3, 10]]
    rows = [[1], [2], [3]]
    _, plan = host.run(
        rows, [7, 8, 8], tables, tables, phase=Phase.DECODE, padded_rows=6, padded_tokens=6, strict=False
    )
    slot, read, write = sees(host, plan, torch.zeros(6, dtype=torch.long))
    assert slot.tolist() == [15, -1, 80, -1, -1, -1]
    assert read.tolist() == [1, 2, 3, -1, -1, -1]
    assert write.tolist() == [1, -1, 10, -1, -1, -1]


@pytest.mark.parametrize("phase", list(Phase))
def test_a_dummy_pass_has_no_slot_to_copy(phase: Phase) -> None:
    host, everyone = HandMade(), [[row + 1] for row in range(8)]
    host.run([tokens(8, seed=row) for row in range(8)], [0] * 8, everyone, everyone)
    _, plan = host.run([[], []], [0, 0], everyone[:2], everyone[:2], phase=phase, padded_rows=4, padded_tokens=6)
    for slot in sees(host, plan, torch.zeros(6, dtype=torch.long)):
        assert (slot == -1).all()


@pytest.fixture
def atom_double() -> Iterator[None]:
    with atom_installed():
        yield


def slots_in(context: Any) -> list[torch.Tensor]:
    """Every tensor of slots in ATOM's metadata, [rows] each in decode."""
    metadata = context.attn_metadata
    found = [metadata.slot_mapping, metadata.plugin_metadata.slot_mapping]
    for group in metadata.rtp_groups:
        found += [group.slot_mapping, group.state_read, group.state_write]
    found += context.state_indices_cache.values()
    gdn = context.gdn_metadata
    if gdn is not None:
        found += [gdn.non_spec_state_indices_tensor, gdn.non_spec_state_indices_in_tensor]
        found += [*gdn.rtp_state_indices_cache.values(), *gdn.rtp_state_indices_in_cache.values()]
    return [slots for slots in found if slots is not None]


@pytest.mark.usefixtures("atom_double")
@pytest.mark.parametrize("cls", CLASSES)
def test_no_copy_in_atoms_metadata_keeps_a_slot_that_a_replay_took_back(
    cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured with four rows, replayed with two: the captured metadata, in every place that holds slots."""
    case = decode(cls, [[4, 0], [7, 9], [2, 3], [5, 6]], [3, 8, 9, 15])
    capture(monkeypatch)
    captured = slots_in(case.build(cg_max_seq_len=16))
    assert len(captured) >= (10 if cls is HYBRID else 3)
    assert all((slots >= 0).all() for slots in captured)
    case.attention.kv_cache_kernel_block_id_device.copy_(int32([[7, 9], [2, 0], [0, 0], [0, 0]]))
    case.attention.sequence_lengths_plus_1_device[:2] = int32([9, 6])  # the others keep 10 and 16
    again = case.build(cg_max_seq_len=16)
    for slots, of_replay in zip(captured, slots_in(again), strict=True):
        assert slots.data_ptr() == of_replay.data_ptr()
        assert (slots[:2] >= 0).all()
        assert slots[2:].tolist() == [-1, -1]
