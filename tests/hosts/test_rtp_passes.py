"""RTP's passes by hand: prefix hits, verify, missing host values, warm-up, graphs, granularity, and bad input."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepbind.caches import KVSpec, StateSpec
from stepbind.context import current
from stepbind.errors import BlockFaultError, NotBoundError, StepError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.hosts.rtp_llm import RtpBinding, StepOptions, read_memory, read_pass
from stepbind.hosts.rtp_llm.groups import GroupSource, granularity_of, spec_on
from stepbind.hosts.rtp_llm.reader import HostTable
from stepbind.layers import discover_layers
from stepbind.models.adapt import adapted
from stepbind.plan import PagedPlan, StatePlan
from stepbind.step import Granularity, Phase
from stepbind.tiny import tiny_model
from tests.hosts.rtp_double.caches import kv_cache
from tests.hosts.rtp_double.graphs import POISON, GraphRunner
from tests.hosts.rtp_double.host import allocate
from tests.hosts.rtp_double.inputs import GENERATIONS, Layout, ModelInputs, Row, int32, model_inputs, probe_inputs
from tests.zoo.harness import assert_close, hybrid, tokens

BLOCK, KERNEL = 8, 4
GROUPS = (
    CacheGroup("linear", GroupKind.STATE, (0,), BLOCK, KERNEL, 24),
    CacheGroup("full", GroupKind.ATTENTION, (1,), BLOCK, KERNEL, 24),
)


class Host:
    """RTP's side of a hybrid of two layers, all of whose memory is NaN; tables are the test's."""

    def __init__(self, generation: str, options: StepOptions | None = None) -> None:
        self.model = hybrid()
        self.layout = Layout(GROUPS, generation, 2)
        self.buffers = allocate(discover_layers(self.model), GROUPS)
        for buffer in self.buffers.values():
            buffer.view(torch.int8).fill_(-1)
        self.binding = RtpBinding(self.model, max_rows=8, max_context=128, options=options)
        self.cache = kv_cache(generation, GROUPS, self.buffers)
        self.binding.initialize(self.cache)

    def inputs(self, phase: Phase, rows: list[Row]) -> ModelInputs:
        return model_inputs(self.layout, phase, rows)

    @torch.no_grad()
    def run(self, inputs: ModelInputs, *, is_graph: bool = False) -> torch.Tensor:
        """Logits [T, vocabulary]."""
        with adapted(self.model), self.binding.bind(inputs, is_graph=is_graph) as context:
            position = context.plan.shared.position[None]
            return self.model(inputs.input_ids[None], position_ids=position, use_cache=False).logits[0]

    def forward(self, inputs: ModelInputs, handle: Any) -> SimpleNamespace:
        """As a runtime, for the graph runner."""
        return SimpleNamespace(hidden_states=self.run(inputs, is_graph=True))

    def prepare_fmha_impl(self, inputs: ModelInputs, is_cuda_graph: bool) -> SimpleNamespace:
        self.binding.prepare_capture(inputs)
        return SimpleNamespace(prepare_cuda_graph=self.binding.check_replay)


@torch.no_grad()
def expected(sequence: list[int]) -> torch.Tensor:
    return hybrid()(torch.tensor([sequence]), use_cache=False).logits[0]


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


@pytest.mark.parametrize("query", [1, 3])
def test_a_replay_of_fewer_rows_takes_nothing_from_stale_lengths(host: Host, query: int) -> None:
    """A batch of 4, then one of 2 in a graph of 4, whose padding rows keep the lengths of the larger batch."""
    prompts = [tokens(5 + index, index) for index in range(4)]
    tables = [[[2 * i + 1, 2 * i + 2, i + 12, i + 17], [2 * i + 1, 2 * i + 2]] for i in range(4)]
    rows = [Row(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
    host.run(host.inputs(Phase.PREFILL, rows))
    graphs = GraphRunner(host, host.layout, [2, 4], 32, query)
    new = [tokens(query, 10 + index) for index in range(4)]
    got = graphs.replay([Row(new[i], len(prompts[i]), tables[i]) for i in range(4)])
    for i in range(4):
        assert_close(got[i * query : (i + 1) * query], expected(prompts[i] + new[i])[-query:])
    graphs.captured[2] = graphs.captured[4]
    untouched = [host.buffers[0].clone(), host.buffers[1].clone()]
    got = graphs.replay([Row(new[3], len(prompts[3]), tables[3])])
    assert_close(got, expected(prompts[3] + new[3])[-query:])
    with host.binding.bind(graphs.captured[4].inputs, is_graph=True) as context:
        shared, prior = context.plan.shared, len(prompts[3])
        assert shared.query_len.tolist() == [query, 0, 0, 0]
        assert shared.prior_len.tolist() == [prior, 0, 0, 0]
        assert shared.context_len.tolist() == [prior + query, 0, 0, 0]
    owned_state, owned = tables[3]
    for buffer, before, blocks, ratio in (
        (host.buffers[0], untouched[0], owned_state, 1),
        (host.buffers[1], untouched[1], owned, BLOCK // KERNEL),
    ):
        others = [b for b in range(buffer.shape[0]) if b // ratio not in blocks]
        assert torch.equal(buffer[others].view(torch.int8), before[others].view(torch.int8))


def test_captured_passes_take_no_position_that_replay_does_not_refresh(host: Host) -> None:
    graphs = GraphRunner(host, host.layout, [2], 32)
    assert graphs.positions.tolist() == [POISON, POISON]
    with host.binding.bind(graphs.captured[2].inputs, is_graph=True) as context:
        assert context.plan.shared.position.tolist() == [0, 0]


def test_a_replay_says_when_a_row_is_too_long(host: Host) -> None:
    decode = SimpleNamespace(sequence_lengths=int32([3, 128]))
    verify = SimpleNamespace(prefix_lengths=int32([3, 126]), input_lengths=int32([3, 3]))
    for lengths in (decode, verify, {"full": decode}):
        with pytest.raises(StepError, match="context of a replayed row: got 129, expected at most 128 tokens"):
            host.binding.check_replay(lengths)
    host.binding.check_replay(SimpleNamespace(sequence_lengths=int32([127])))
    host.binding.check_replay(SimpleNamespace(sequence_lengths=None))


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


def each(inputs: ModelInputs) -> list[Any]:
    """The attention inputs of each group."""
    found = inputs.attention_inputs
    return list(found.values()) if isinstance(found, dict) else [found]


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


# Bad input: (what a test does to good inputs or to the cache, the error).
def drop(name: str) -> Any:
    return lambda host, inputs: [setattr(attention, name, None) for attention in each(inputs)]


def replace(name: str, value: Any) -> Any:
    return lambda host, inputs: [setattr(attention, name, value) for attention in each(inputs)]


def both(*changes: Any) -> Any:
    return lambda host, inputs: [change(host, inputs) for change in changes]


def bad_group(host: Host, inputs: ModelInputs) -> None:
    each(inputs)[0].kv_cache_layer_to_group = int32([0, 2])


def no_buffer(host: Host, inputs: ModelInputs) -> None:
    host.cache.get_layer_cache(1).kv_cache_base = None


def scalar_buffer(host: Host, inputs: ModelInputs) -> None:
    host.cache.get_layer_cache(1).kv_cache_base = torch.tensor(1.0)


def bad_block_size(host: Host, inputs: ModelInputs) -> None:
    host.cache.seq_size_per_block = 0


BAD: list[tuple[str, Phase, Any, str]] = [
    (
        "older",
        Phase.DECODE,
        lambda host, inputs: setattr(inputs, "attention_inputs", None),
        "inputs.attention_inputs: ",
    ),
    ("newer", Phase.DECODE, lambda host, inputs: inputs.attention_inputs.clear(), "inputs.attention_inputs: got none"),
    ("older", Phase.DECODE, both(drop("input_lengths"), drop("input_lengths_device")), "input_lengths: got none, exp"),
    (
        "newer",
        Phase.DECODE,
        both(drop("sequence_lengths"), drop("sequence_lengths_plus_1_device")),
        "sequence_lengths: got none, expected one length for each row",
    ),
    ("older", Phase.PREFILL, both(drop("prefix_lengths"), drop("prefix_lengths_device")), "prefix_lengths: got none"),
    ("older", Phase.PREFILL, replace("prefix_lengths", int32([0])), "prefix_lengths: got 1 rows, expected 2 rows"),
    ("newer", Phase.DECODE, replace("sequence_lengths", int32([1, 1, 1])), "sequence_lengths: got 3 rows, expected 2"),
    (
        "newer",
        Phase.DECODE,
        replace("sequence_lengths_plus_1_device", int32([1])),
        "sequence_lengths_plus_1_device: got 1 rows, expected 2 rows",
    ),
    ("newer", Phase.DECODE, drop("kv_cache_kernel_block_id_device"), "of 'linear': got none, expected a block table"),
    (
        "newer",
        Phase.DECODE,
        replace("kv_cache_kernel_block_id_device", torch.zeros(3, 4, dtype=torch.int32)),
        r"shape \(3, 4\), expected \[2 rows as in input_lengths",
    ),
    (
        "newer",
        Phase.DECODE,
        replace("kv_cache_kernel_block_id_device", torch.zeros(2, 4)),
        "got torch.float32, expected torch.int32",
    ),
    ("older", Phase.DECODE, bad_group, r"kv_cache_layer_to_group\[1\]: got 2, expected a group number, 0 .. 1"),
    ("older", Phase.DECODE, drop("kv_cache_layer_to_group"), "kv_cache_layer_to_group: got none, expected the group"),
    ("older", Phase.DECODE, bad_block_size, "kv_cache.seq_size_per_block: got 0, expected at least 1 token"),
    ("older", Phase.DECODE, no_buffer, "layer 1 kv_cache_base: got none, expected the layer's cache buffer"),
    ("newer", Phase.DECODE, scalar_buffer, "layer 1 kv_cache_base: got a tensor of no dimensions"),
    ("newer", Phase.DECODE, lambda host, inputs: setattr(inputs, "input_ids", None), "inputs.input_ids: got none"),
    (
        "newer",
        Phase.DECODE,
        lambda host, inputs: setattr(inputs, "input_ids", int32([1, 2, 3])),
        "padded_tokens|input_ids: got 3 tokens, expected the 2 that the lengths say",
    ),
]


@pytest.mark.parametrize(("generation", "phase", "change", "message"), BAD)
def test_bad_input_is_named_and_leaves_nothing_bound(generation: str, phase: Phase, change: Any, message: str) -> None:
    host = Host(generation)
    prior = 0 if phase is Phase.PREFILL else 4
    inputs = host.inputs(phase, [Row([1], prior, [[5, 6], [1, 2]]), Row([2], prior, [[7, 8], [3, 4]])])
    forward = host.model.model.layers[0].linear_attn.forward
    change(host, inputs)
    with pytest.raises(StepError, match=message) as caught:
        host.run(inputs)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(NotBoundError):
        current()
    assert host.model.model.layers[0].linear_attn.forward == forward
    assert host.model.config._attn_implementation != "stepbind"


def test_a_prefill_in_a_graph_is_an_error(host: Host) -> None:
    with pytest.raises(StepError, match="is_cuda_graph: got a prefill pass, expected decode or target verify"):
        host.run(host.inputs(Phase.PREFILL, [Row([1], 0, [[5], [1]])]), is_graph=True)


def test_a_one_dimensional_table_is_that_of_a_single_row() -> None:
    inputs = model_inputs(Layout(GROUPS, "newer", 2), Phase.DECODE, [Row([1], 4, [[5], [1]])])
    for attention in each(inputs):
        attention.kv_cache_kernel_block_id_device = attention.kv_cache_kernel_block_id_device[0]
    assert [tuple(table.blocks.shape) for table in read_pass(inputs).tables] == [(1, 1), (1, 2)]


def test_no_cache_is_named() -> None:
    with pytest.raises(StepError, match="kv_cache: got none, expected an initialized cache"):
        read_memory(None, [0])


def test_the_external_package_says_what_is_missing_without_rtp_llm() -> None:
    assert "rtp_llm" not in sys.modules
    with pytest.raises(ImportError, match=r"is loaded by RTP-LLM .* and needs its package rtp_llm"):
        __import__("stepbind.hosts.rtp_llm.models")


@pytest.fixture
def registered() -> Iterator[dict[str, Any]]:
    from tests.hosts.rtp_double.modules import rtp_llm_installed

    with rtp_llm_installed() as models:
        yield models


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3", "qwen3"])
def test_a_checkpoint_loads_as_rtp_loads_it(registered: dict[str, Any], family: str, tmp_path: Any) -> None:
    from stepbind.tiny import save_tiny

    save_tiny(family, tmp_path)
    model_class = registered["stepbind"]
    config = model_class.create_config(str(tmp_path))
    assert (config.num_layers, config.hidden_size, config.vocab_size) == ({"qwen3_5": 4}.get(family, 3), 64, 257)
    assert config.attn_config.use_mla == (family == "deepseek_v3")
    assert config.hybrid_attention_config.enable_hybrid_attention == (family == "qwen3_5")
    model = model_class(config, max_generate_batch_size=4)
    assert model.support_cuda_graph()
    model.load()
    weights = model.weight.global_weights
    assert sorted(weights) == ["embedding", "final_layernorm.gamma", "lm_head"]
    causal = model.py_model.causal_model
    assert weights["lm_head"].data_ptr() == causal.get_output_embeddings().weight.data_ptr()
    # Before there is a cache, a pass runs and gives hidden states.
    out = model.py_model.forward(ModelInputs(int32([1, 2, 3]), None))
    assert out.hidden_states.shape == (3, 64)
    model.py_model.close()
