"""Boolean-mask indexing and `.item()` in the step: the GPU waits for the host. Guards: sizes come from the host's
lengths and values from the device's, in both fills, in the reading of a host's pass, in the ops that a GPU runs, and in
a captured pass from the fill to the next token.

Everything here runs on a device that has no values to read back (`valueless.py`); tests/gpu does the same on a GPU, in
torch's sync debug mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepbind import Phase, adapted, bind, build_plan, make_arena, make_step
from stepbind.hosts.local.graphs import DecodeGraphs
from stepbind.hosts.local.rows import DecodeRows
from stepbind.hosts.rtp_llm import RtpBinding
from stepbind.layers import discover_layers
from stepbind.ops import fla_gated_delta
from stepbind.plan import Arena, Sizes, StatePlan
from stepbind.step import Step
from tests.hosts.rtp_double.by_hand import GROUPS as RTP_GROUPS
from tests.hosts.rtp_double.by_hand import each
from tests.hosts.rtp_double.caches import kv_cache
from tests.hosts.rtp_double.host import allocate
from tests.hosts.rtp_double.inputs import GENERATIONS, Layout, Row, model_inputs
from tests.random_steps import bounded_step, steps
from tests.zoo.harness import HandMade
from tests.zoo.valueless import DEVICE, count_launches, valueless, valueless_caches, valueless_model

GROUPS = HandMade().groups


def arena_of(step: Step) -> Arena:
    sizes = {"max_rows": step.padded_rows, "max_tokens": step.padded_tokens, "max_context": max(step.max_context, 1)}
    return make_arena(step.groups, **sizes, device=DEVICE)


def test_the_device_answers_no_question() -> None:
    """What the rest of this file stands on."""
    tensor = torch.ones(3, device=DEVICE)
    for question in (
        lambda: tensor.sum().item(),
        lambda: tensor.tolist(),
        lambda: bool(tensor[0]),
        lambda: tensor.cpu(),
        lambda: tensor[tensor > 0],
        lambda: torch.nonzero(tensor),
        lambda: torch.repeat_interleave(tensor, tensor.int()),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            question()


@settings(max_examples=25)
@given(steps() | st.integers(0, 2**32).map(bounded_step))
def test_the_fill_in_torch_operations_asks_nothing(step: Step) -> None:
    step = valueless(step)
    build_plan(step, arena_of(step), strict=False, triton=False)


@settings(max_examples=25)
@given(steps() | st.integers(0, 2**32).map(bounded_step))
def test_the_launch_of_the_fill_kernel_asks_nothing(step: Step) -> None:
    with pytest.MonkeyPatch.context() as patch:
        launches = count_launches(patch)
        step = valueless(step)
        build_plan(step, arena_of(step), strict=False, triton=True)
    assert launches == ["fill_decode" if step.phase is Phase.DECODE else "fill_ragged"]


@pytest.mark.parametrize(("phase", "query"), [(Phase.PREFILL, 70), (Phase.DECODE, 1), (Phase.VERIFY, 3)])
def test_a_pass_from_step_to_logits_asks_nothing(phase: Phase, query: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = count_launches(monkeypatch)
    model = valueless_model()
    caches = valueless_caches(model, GROUPS)
    tables = {group.name: torch.ones(4, 16, dtype=torch.int32) for group in GROUPS}
    step = valueless(make_step(GROUPS, phase, [query] * 4, [9] * 4, tables, padded_rows=6, padded_tokens=300))
    plan = build_plan(step, make_arena(GROUPS, max_rows=6, max_tokens=300, max_context=128, device=DEVICE), triton=True)
    ids = torch.zeros(1, 300, dtype=torch.long, device=DEVICE)
    with adapted(model), bind(plan, caches, model), torch.no_grad():
        logits = model(ids, position_ids=plan.shared.position[None], use_cache=False).logits
    assert logits.shape[:2] == (1, 300)
    # One launch a step, and then one or a few a layer.
    assert launches[0] == ("fill_decode" if phase is Phase.DECODE else "fill_ragged")
    assert {"_write_kv", "_recurrent_gated_delta"} < set(launches[1:])


def test_a_long_prefill_in_chunks_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = count_launches(monkeypatch)
    monkeypatch.setattr(fla_gated_delta, "_chunk_function", lambda: lambda *a, **k: (a[2], k["initial_state"]))
    monkeypatch.setattr(fla_gated_delta, "_rounds_on_device", rounds_on_device)
    tables = {group.name: torch.ones(2, 16, dtype=torch.int32) for group in GROUPS}
    step = valueless(make_step(GROUPS, Phase.PREFILL, [100, 7], [5, 16], tables))
    plan = build_plan(step, arena_of(step), strict=False)
    states = plan.groups[1]
    assert isinstance(states, StatePlan)
    query, value, rate = (torch.empty(107, 2, *rest, device=DEVICE) for rest in ((16,), (16,), ()))
    recurrent = torch.empty(24, 2, 16, 16, device=DEVICE)
    arguments = (query, query, value, rate, rate, recurrent, states, plan.shared, plan.sizes)
    assert fla_gated_delta.chunked_gated_delta(*arguments).shape == value.shape
    assert "_gather_states" in launches
    assert "_scatter_states" in launches


def rounds_on_device(sizes: Sizes, block_size: int, device: torch.device) -> list[fla_gated_delta.Round]:
    """Without the copy, which takes pinned memory that only a GPU's driver has."""
    host = fla_gated_delta.rounds(sizes.query_len.astype(np.int64), sizes.prior_len.astype(np.int64), block_size)
    return [
        fla_gated_delta.Round(
            **{name: None if x is None else torch.from_numpy(x).to(device) for name, x in vars(part).items()}
        )
        for part in host
    ]


def test_a_graph_of_the_local_host_asks_nothing_until_its_tokens_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures and replays, choice of the next tokens included, with the rows' tables and lengths on the device."""
    launches = count_launches(monkeypatch)
    model = valueless_model()
    arena = make_arena(GROUPS, max_rows=4, max_tokens=4, max_context=128, device=DEVICE)
    rows = DecodeRows(GROUPS, max_rows=4, max_context=128, device=DEVICE)
    graphs = DecodeGraphs(model, arena, valueless_caches(model, GROUPS), rows, (1, 4), compile_layers=False)
    with adapted(model), torch.no_grad():
        graphs.capture()
        rows.go_on()
        graph = graphs.for_rows(3)
        graph.replay()
    assert graph.result.shape == (4 + 2 * len(GROUPS),)
    assert launches.count("_write_kv") == 3  # two captures and a replay, of a model with one attention layer


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize(
    ("phase", "is_graph"), [*((phase, False) for phase in Phase), (Phase.DECODE, True), (Phase.VERIFY, True)]
)
def test_reading_a_pass_of_rtp_asks_nothing(generation: str, phase: Phase, is_graph: bool) -> None:
    """What RTP has on its host is there, and everything else on a device."""
    model = valueless_model()
    buffers = allocate(discover_layers(model), RTP_GROUPS)
    binding = RtpBinding(model, max_rows=4, max_context=64)
    binding.initialize(
        kv_cache(generation, RTP_GROUPS, {layer: buffer.to(DEVICE) for layer, buffer in buffers.items()})
    )
    query, prior = {Phase.PREFILL: (9, 8), Phase.DECODE: (1, 9), Phase.VERIFY: (3, 9)}[phase]
    rows = [Row([1] * query, prior, [[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])] * 2
    inputs = model_inputs(Layout(RTP_GROUPS, generation, 2), phase, rows)
    for attention in each(inputs):
        to_device(attention)
    inputs.input_ids = inputs.input_ids.to(DEVICE)  # type: ignore[union-attr]
    for _ in range(2):
        with binding.bind(inputs, is_graph=is_graph) as context:
            assert context.plan.shared.position.device == DEVICE


def to_device(attention: Any) -> None:
    for name, value in vars(attention).items():
        if name.endswith("_by_group"):
            setattr(attention, name, [table.to(DEVICE) for table in value])
        elif "_device" in name:
            setattr(attention, name, value.to(DEVICE))
