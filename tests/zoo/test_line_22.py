"""Group information remembered from the profiling run used with the real cache. Guards: what RtpBinding and ATOM's
contexts keep of groups is keyed by the numbers of blocks and the block sizes that it was made for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from stepbind import Phase
from stepbind.layers import discover_layers
from tests.hosts.rtp_double.by_hand import GROUPS, Host, expected
from tests.hosts.rtp_double.caches import kv_cache
from tests.hosts.rtp_double.graphs import GraphRunner
from tests.hosts.rtp_double.host import allocate
from tests.hosts.rtp_double.inputs import GENERATIONS, Layout, Row, probe_inputs
from tests.targets.atom_double.case import HYBRID, decode
from tests.targets.atom_double.modules import atom_installed
from tests.targets.atom_double.passes import runtime_for
from tests.zoo.harness import assert_close, tokens

LARGER = tuple(dataclasses.replace(group, block_size=16, num_blocks=40) for group in GROUPS)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("told", [True, False], ids=["initialized again", "filled in place"])
def test_a_profiling_run_leaves_nothing_behind(generation: str, told: bool) -> None:
    """Profiled on few small blocks; served on more and larger ones, whose ids the small cache did not have."""
    host, prompt = Host(generation), tokens(30)
    host.run(probe_inputs(host.layout, 3))
    host.run(host.inputs(Phase.PREFILL, [Row(prompt[:9], 0, [[5, 6], [1, 2]])]))
    host.layout = Layout(LARGER, generation, 2)
    host.buffers = allocate(discover_layers(host.model), LARGER)
    real = kv_cache(generation, LARGER, host.buffers)
    if told:
        host.binding.initialize(real)
    else:
        vars(host.cache).update(vars(real))
    tables = [[38, 39], [38, 39]]
    got = host.run(host.inputs(Phase.PREFILL, [Row(prompt[:18], 0, tables)]))
    assert_close(got, expected(prompt)[:18])
    graphs = GraphRunner(host, host.layout, [2], 32)
    for position in range(18, 24):
        got = graphs.replay([Row([prompt[position]], position, tables)])
        assert_close(got[0], expected(prompt)[position])


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_run_before_there_is_a_cache_leaves_nothing_behind(generation: str) -> None:
    host, prompt = Host(generation), tokens(20)
    host.binding.initialize(None)
    assert host.run(host.inputs(Phase.PREFILL, [Row(prompt, 0, [[5, 6, 7], [1, 2, 3]])])).isfinite().all()
    host.binding.initialize(host.cache)
    got = host.run(host.inputs(Phase.PREFILL, [Row(prompt, 0, [[5, 6, 7], [1, 2, 3]])]))
    assert_close(got, expected(prompt))


@pytest.fixture
def atom_double() -> Iterator[None]:
    with atom_installed():
        yield


@pytest.mark.usefixtures("atom_double")
@pytest.mark.parametrize("in_place", [False, True], ids=["another cache", "changed in place"])
def test_atoms_contexts_divide_by_the_real_caches_block_size(in_place: bool) -> None:
    """Profiled on blocks of 8 tokens, served on as many of 16: token 16 is then the first of the second block."""
    case = decode(HYBRID)
    assert case.plugin().slot_mapping.tolist() == [4 * 8 + 7, 9 * 8, 5 * 8]
    if in_place:
        case.runtime.kv_cache.seq_size_per_block = case.runtime.kv_cache.kernel_seq_size_per_block = 16
    else:
        case.runtime.kv_cache = runtime_for(case.model, 16, 16, 12).kv_cache
    context = case.build()
    assert context.attn_metadata.slot_mapping.tolist() == [4 * 16 + 7, 7 * 16 + 8, 3 * 16]
    assert context.gdn_metadata.non_spec_state_indices_tensor.tolist() == [4, 7, 3]
    assert context.rtp_seq_size_per_block == 16
