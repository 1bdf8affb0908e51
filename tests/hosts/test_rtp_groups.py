"""Groups and views on RTP's memory: what the ids of a table count, layers that share a group, KV heads, dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepbind.caches import KVSpec, StateSpec
from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.hosts.rtp_llm import RtpBinding, StepOptions
from stepbind.hosts.rtp_llm.groups import GroupSource, granularity_of, spec_on
from stepbind.hosts.rtp_llm.reader import HostTable
from stepbind.layers import discover_layers
from stepbind.models.adapt import adapted
from stepbind.plan import PagedPlan, StatePlan
from stepbind.step import Granularity, Phase
from stepbind.tiny import tiny_model
from tests.hosts.rtp_double.by_hand import BLOCK, KERNEL, Host, expected
from tests.hosts.rtp_double.caches import kv_cache
from tests.hosts.rtp_double.host import allocate
from tests.hosts.rtp_double.inputs import Layout, Row, model_inputs
from tests.zoo.harness import assert_close, hybrid, tokens

# What the ids of a table count: (kind, kernel columns, physical columns beside it, longest context) -> granularity.
KV, RS = GroupKind.ATTENTION, GroupKind.STATE
KERNELS, BLOCKS = Granularity.KERNEL, Granularity.PHYSICAL


@pytest.mark.parametrize(
    ("kind", "columns", "store", "context", "want"),
    [
        (KV, 8, 2, 100, KERNELS),  # 8 columns of 16 tokens, or 512 tokens: RTP's own width
        (KV, 8, None, 100, KERNELS),
        (KV, 8, None, 300, BLOCKS),  # kernel blocks would hold 128 tokens
        (KV, 3, None, 40, BLOCKS),  # RTP has four kernel blocks for each physical one
        (KV, 6, None, 40, BLOCKS),
        (KV, 8, None, None, KERNELS),  # in a graph lengths do not tell
        (RS, 8, 8, 100, BLOCKS),  # recurrent groups are not expanded
        (RS, 8, None, 100, BLOCKS),
        (RS, 8, 2, 100, KERNELS),  # but where one is, its width shows it
    ],
)
def test_the_granularity_of_a_table(
    kind: GroupKind, columns: int, store: int | None, context: int | None, want: Granularity
) -> None:
    source = GroupSource(CacheGroup("g", kind, (0,), 64, 16, 9), 0, False)
    table = HostTable("g", torch.zeros(1, columns, dtype=torch.int32), store)
    assert granularity_of(source, table, context) is want


def test_an_ambiguous_table_is_an_error_until_the_host_says() -> None:
    """A compact table whose columns the ratio divides (seed behaviour 24)."""
    host = Host("newer")
    inputs = host.inputs(Phase.PREFILL, [Row(tokens(6), 0, [[5, 0], [1, 2]])])
    full = inputs.attention_inputs["full"]
    full.kv_cache_kernel_block_id_device = full.kv_cache_block_id_device
    with pytest.raises(StepError, match="2 columns, as many as the physical table, and enough for 6 tokens either way"):
        host.run(inputs)
    said = Host("newer", StepOptions(granularity={"full": Granularity.PHYSICAL}))
    assert_close(said.run(inputs), expected(tokens(6)))


def test_layers_of_two_kinds_in_one_group_have_a_group_each() -> None:
    model = hybrid()
    group = CacheGroup("all", GroupKind.ATTENTION, (0, 1), BLOCK, KERNEL, 24)
    binding = RtpBinding(model, max_rows=2, max_context=64)
    binding.initialize(kv_cache("older", (group,), allocate(discover_layers(model), (group,))))
    step, _ = binding.read(model_inputs(Layout((group,), "older", 2), Phase.PREFILL, [Row(tokens(9), 0, [[3, 4]])]))
    assert [group.name for group in step.groups] == ["all.state", "all.attention"]
    assert step.tables[0].blocks is step.tables[1].blocks
    plan = binding_plan(binding, step)
    assert plan[0].state_write.tolist() == [4]
    assert plan[1].block_table.tolist() == [[6, 7, 8]]


def binding_plan(binding: RtpBinding, step: Any) -> tuple[StatePlan, PagedPlan]:
    from stepbind.plan import build_plan, make_arena

    state, paged = build_plan(step, make_arena(step.groups, max_rows=2, max_tokens=16, max_context=64)).groups
    assert isinstance(state, StatePlan)
    assert isinstance(paged, PagedPlan)
    return state, paged


def test_tensor_parallel_ranks_repeat_kv_heads_that_the_cache_keeps_whole() -> None:
    """A rank with one of four KV heads, on a cache that holds all of them: shapes are the modules' own."""
    model = tiny_model("llama", num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    layers = discover_layers(model)
    group = CacheGroup("full", GroupKind.ATTENTION, (0,), 4, 4, 9)
    buffer = torch.full((9, 2, 4, 4, 16), float("nan"))
    assert spec_on(buffer, layers[0]) == KVSpec(num_kv_heads=4, head_dim=16, dtype=torch.float32)
    binding = RtpBinding(model, max_rows=2, max_context=64)
    binding.initialize(kv_cache("newer", (group,), {0: buffer}))
    sequence = tokens(11)
    layout = Layout((group,), "newer", 1)
    with torch.no_grad():
        want = model(torch.tensor([sequence]), use_cache=False).logits[0]
        for start, stop in ((0, 6), (6, 10), (10, 11)):
            phase = Phase.DECODE if start == 10 else Phase.PREFILL
            inputs = model_inputs(layout, phase, [Row(sequence[start:stop], start, [[2, 3, 4]])])
            with adapted(model), binding.bind(inputs) as context:
                position = context.plan.shared.position[None]
                got = model(inputs.input_ids[None], position_ids=position, use_cache=False).logits[0]
            assert_close(got, want[start:stop])
    assert torch.equal(buffer[2:4, :, :1].expand(-1, -1, 4, -1, -1), buffer[2:4])


def test_states_are_of_the_dtype_of_a_buffer_that_is_not_bytes() -> None:
    layer = discover_layers(hybrid())[0]
    for dtype, want in ((torch.uint8, torch.float32), (torch.bfloat16, torch.bfloat16)):
        spec = spec_on(torch.empty(2, 4, dtype=dtype), layer)
        assert isinstance(spec, StateSpec)
        assert spec.state_dtype == want
