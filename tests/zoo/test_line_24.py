"""slot * stride in 32 bits wraps above 2^31 elements: crash or silent garbage.
Guard: fill_torch._fill_paged computes slots from 64-bit block ids. Buffers are sparse files: they are large in
addresses alone."""

from __future__ import annotations

from pathlib import Path

import torch

from stepbind import CacheGroup, GroupKind, Phase, build_plan, make_arena, make_step
from stepbind.caches import KVSpec, StateSpec, kv_pages, state_slots
from stepbind.ops.attention import paged_attention
from stepbind.ops.cache_write import write_kv
from stepbind.ops.causal_conv import causal_conv
from stepbind.ops.gated_delta import gated_delta
from stepbind.plan import PagedPlan, Plan, StatePlan


def plan_of(group: CacheGroup, block: int) -> Plan:
    table = {group.name: torch.tensor([[block]], dtype=torch.int32)}
    step = make_step([group], Phase.PREFILL, [3], [0], table)
    return build_plan(step, make_arena([group], max_rows=1, max_tokens=8, max_context=64))


def test_slots_are_64_bit() -> None:
    group = CacheGroup("full", GroupKind.ATTENTION, (0,), block_size=64, kernel_block_size=16, num_blocks=2**28)
    plan = plan_of(group, 2**28 - 1).groups[0]
    assert isinstance(plan, PagedPlan)
    assert plan.slot.tolist() == [(2**28 - 1) * 64 + offset for offset in range(3)]


def test_pages_past_two_to_the_31_elements_are_written_and_read_where_they_are(tmp_path: Path) -> None:
    spec = KVSpec(num_kv_heads=1, head_dim=64, dtype=torch.float16)
    elements = 2 * 16 * 64  # a block's keys and values
    blocks = 2**31 // elements + 10
    group = CacheGroup("full", GroupKind.ATTENTION, (0,), block_size=16, kernel_block_size=16, num_blocks=blocks)
    flat = torch.from_file(str(tmp_path / "pages"), shared=True, size=blocks * elements, dtype=torch.float16)
    pages = kv_pages(flat.view(blocks, 2, 1, 16, 64), spec, group, layer=0)
    plan = plan_of(group, blocks - 1)
    paged = plan.groups[0]
    assert isinstance(paged, PagedPlan)
    key, value, query = (torch.randn(3, 1, 64).half() for _ in range(3))
    write_kv(pages, key, value, paged.slot)
    start = (blocks - 1) * elements
    assert start > 2**31
    torch.testing.assert_close(flat[start : start + 3 * 64].view(3, 1, 64), key)
    wrapped = (start + 2**31) % 2**32 - 2**31
    assert not flat[max(wrapped, 0) : max(wrapped, 0) + 3 * 64].any()
    out = paged_attention(query, pages, paged, plan.shared, plan.sizes, scale=0.1)
    torch.testing.assert_close(out[0], value[0], atol=1e-3, rtol=1e-3)  # the first token sees itself alone


def test_states_past_two_to_the_31_elements_are_written_where_they_are(tmp_path: Path) -> None:
    spec = StateSpec(2, 128, 128, 4, 16, torch.float16, torch.float16)
    blocks = 2**31 // (spec.block_bytes // 2) + 10
    group = CacheGroup("state", GroupKind.STATE, (0,), block_size=16, kernel_block_size=16, num_blocks=blocks)
    flat = torch.from_file(str(tmp_path / "states"), shared=True, size=blocks * spec.block_bytes, dtype=torch.uint8)
    slots = state_slots(flat.view(blocks, -1), spec, group, layer=0)
    plan = plan_of(group, blocks - 1)
    state = plan.groups[0]
    assert isinstance(state, StatePlan)
    causal_conv(torch.ones(3, 16).half(), torch.ones(16, 4).half(), None, slots.conv, state, plan.shared)
    inputs = [torch.randn(3, 2, 128) for _ in range(3)] + [-torch.ones(3, 2), torch.ones(3, 2)]
    gated_delta(*inputs, slots.recurrent, state, plan.shared, plan.sizes)
    written = flat.view(blocks, -1)
    assert written[blocks - 1, : spec.state_bytes].any()
    assert slots.conv[blocks - 1].tolist() == [[1.0] * 16] * 3
    assert not written[: blocks - 1 : 100_003].any()
