"""RTP's passes by hand: prefix hits, verify, missing host values, positions, probes, and caches that change."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stepbind.errors import BlockFaultError, StepError
from stepbind.hosts.rtp_llm import StepOptions, read_pass
from stepbind.layers import discover_layers
from stepbind.step import Phase
from tests.hosts.rtp_double.by_hand import BLOCK, GROUPS, Host, each, expected
from tests.hosts.rtp_double.caches import kv_cache
from tests.hosts.rtp_double.host import allocate
from tests.hosts.rtp_double.inputs import GENERATIONS, Layout, ModelInputs, Row, int32, model_inputs, probe_inputs
from tests.zoo.harness import assert_close, tokens


@pytest.fixture(params=GENERATIONS)
def host(request: pytest.FixtureRequest) -> Host:
    return Host(request.param)


def test_a_prefix_hit_made_by_hand(host: Host) -> None:
    """The second request's tables start with the first one's full blocks; of the recurrent group it has the last."""
    shared, first, second = tokens(16, 1), tokens(5, 2), tokens(9, 3)
    host.run(host.inputs(Phase.PREFILL, [Row(shared + first, 0, [[5, 6, 7], [1, 2, 3]])]))
    before = host.buffers[0][6].clone()
    got = host.run(host.inputs(Phase.PREFILL, [Row(second, 16, [[-1, 6, 9, 10], [1, 2, 11, 12]])]))
    assert_close(got, expected(shared + second)[16:])
    assert torch.equal(host.buffers[0][6], before)
    both = [Row([7], 21, [[-1, 6, 7], [1, 2, 3]]), Row([8], 25, [[-1, 6, 9, 10], [1, 2, 11, 12]])]
    got = host.run(host.inputs(Phase.DECODE, both))
    assert_close(got[0], expected([*shared, *first, 7])[-1])
    assert_close(got[1], expected([*shared, *second, 8])[-1])


def test_verify_stores_each_drafts_state_apart(host: Host) -> None:
    """Three drafted tokens; one is accepted, and the next pass goes on from the state behind it."""
    prompt, drafts = tokens(7, 4), tokens(3, 5)
    host.run(host.inputs(Phase.PREFILL, [Row(prompt, 0, [[5], [1]])]))
    tables = [[5, 6, 7], [1, 2]]
    got = host.run(host.inputs(Phase.VERIFY, [Row(drafts, 7, tables)]))
    assert_close(got, expected(prompt + drafts)[7:])
    # The state after the first draft, 8 tokens, is in column 7 // 8 + 0; the host now decodes from there.
    got = host.run(host.inputs(Phase.DECODE, [Row([9], 8, [[5, 8], [1, 2]])]))
    assert_close(got[0], expected([*prompt, drafts[0], 9])[-1])


def test_positions_come_from_the_host_where_it_has_them(host: Host) -> None:
    inputs = host.inputs(Phase.PREFILL, [Row(tokens(3), 2, [[5], [1]])])
    with host.binding.bind(inputs) as context:
        assert context.plan.shared.position.tolist() == [2, 3, 4]
    for attention in each(inputs):
        attention.combo_position_ids = int32([7, 8, 9])
    with host.binding.bind(inputs) as context:
        assert context.plan.shared.position.tolist() == [7, 8, 9]
        assert context.plan.groups[1].slot.tolist() == [BLOCK + 2, BLOCK + 3, BLOCK + 4]
    for attention in each(inputs):
        attention.combo_position_ids = torch.arange(9, dtype=torch.int32)
    with pytest.raises(StepError, match="combo_position_ids: got 9 positions, expected one for each of 3 tokens"):
        host.run(inputs)


def without_host_lengths(inputs: ModelInputs) -> ModelInputs:
    for attention in each(inputs):
        attention.input_lengths = attention.prefix_lengths = attention.sequence_lengths = None
    return inputs


def test_a_decode_without_host_lengths_works_on_bounds(host: Host) -> None:
    prompts = [tokens(5, 1), tokens(11, 2)]
    tables = [[[5, 6], [1, 2]], [[-1, 8], [3, 4]]]
    rows = [Row(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
    host.run(host.inputs(Phase.PREFILL, rows))
    rows = [Row([i], len(prompts[i]), tables[i]) for i in range(2)]
    got = host.run(without_host_lengths(host.inputs(Phase.DECODE, rows)))
    for i in range(2):
        assert_close(got[i], expected([*prompts[i], i])[-1])


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_prefill_without_host_lengths_is_read_back_where_that_is_allowed(generation: str) -> None:
    rows = [Row(tokens(5, 1), 0, [[5], [1]]), Row(tokens(3, 2), 0, [[6], [2]])]
    strict, reading = Host(generation), Host(generation, StepOptions(read_back=True))
    with pytest.raises(StepError, match=r"no host values, expected lengths on the host, or read_back=True"):
        strict.run(without_host_lengths(strict.inputs(Phase.PREFILL, rows)))
    got = reading.run(without_host_lengths(reading.inputs(Phase.PREFILL, rows)))
    assert_close(got[5:], expected(rows[1].tokens))


@pytest.mark.parametrize("phase", list(Phase))
def test_the_probe_for_the_output_dtype_touches_nothing(host: Host, phase: Phase) -> None:
    before = {layer: buffer.clone() for layer, buffer in host.buffers.items()}
    got = host.run(probe_inputs(host.layout, 3, phase))
    assert got.shape[0] == 3
    assert got.isfinite().all()
    for layer, buffer in host.buffers.items():
        assert torch.equal(buffer.view(torch.int8), before[layer].view(torch.int8))


def test_a_pass_before_there_is_a_cache_runs_on_nothing(host: Host) -> None:
    host.binding.initialize(None)
    assert host.run(host.inputs(Phase.PREFILL, [Row(tokens(4), 0, [[5], [1]])])).isfinite().all()


def test_another_cache_takes_the_place_of_the_first(host: Host) -> None:
    """Also one of other sizes: nothing of the first cache is remembered (zoo line 22)."""
    prompt = tokens(9, 1)
    host.run(host.inputs(Phase.PREFILL, [Row(prompt, 0, [[5, 6], [1, 2]])]))
    larger = tuple(dataclasses.replace(group, block_size=16, num_blocks=10) for group in GROUPS)
    host.layout = Layout(larger, host.layout.generation, 2)
    host.buffers = allocate(discover_layers(host.model), larger)
    host.binding.initialize(kv_cache(host.layout.generation, larger, host.buffers))
    got = host.run(host.inputs(Phase.PREFILL, [Row(prompt, 0, [[5], [1]])]))
    assert_close(got, expected(prompt))


def test_a_missing_block_is_named(host: Host) -> None:
    with pytest.raises(BlockFaultError, match=r"1 in group 'full' \(first in row 1\)|1 in group 'group1'"):
        host.run(host.inputs(Phase.DECODE, [Row([1], 4, [[5], [1]]), Row([1], 8, [[5, 6], [1, 0]])]))


def test_a_one_dimensional_table_is_that_of_a_single_row() -> None:
    inputs = model_inputs(Layout(GROUPS, "newer", 2), Phase.DECODE, [Row([1], 4, [[5], [1]])])
    for attention in each(inputs):
        attention.kv_cache_kernel_block_id_device = attention.kv_cache_kernel_block_id_device[0]
    assert [tuple(table.blocks.shape) for table in read_pass(inputs).tables] == [(1, 1), (1, 2)]
