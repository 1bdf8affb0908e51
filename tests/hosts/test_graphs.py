"""Decode by graphs, run again on the CPU with the host scalars of their capture: the tokens are transformers', though
everything that a host does not refresh between two replays holds garbage."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stepbind import EngineOptions, LocalEngine, SamplingParams
from stepbind.hosts.local import graphs
from stepbind.hosts.local.graphs import DecodeGraphs, Graph, inductor_options
from stepbind.ops import linear
from stepbind.ops.join_linear import JoinLinear
from stepbind.plan import Arena
from stepbind.tiny import TINY, tiny_model
from tests.hosts.reference import expected, model_of

ROWS, NEW_TOKENS = 13, 36
OPTIONS = EngineOptions(
    block_size=16,
    kernel_block_size=4,
    token_budget=128,
    max_rows=11,
    cache_tokens=1024,
    graphs=True,
    graph_rows=(1, 4, 8),
)


def spoil(arena: Arena) -> None:
    """Garbage in every buffer of the arena. The graph's own fill has to write all that its layers read."""
    for values in (arena.shared, *arena.groups):
        for value in vars(values).values():
            if isinstance(value, torch.Tensor):
                value.fill_(1 if value.dtype is torch.bool else 7)


@pytest.fixture
def spoiled_replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Spoils the arena before each replay; the live and padded rows of each are noted."""
    replays: list[tuple[int, int]] = []
    real = DecodeGraphs.for_rows

    def for_rows(self: DecodeGraphs, count: int) -> Graph:
        graph = real(self, count)

        def replay() -> None:
            replays.append((count, graph.rows))
            spoil(self._arena)
            graph.replay()

        return dataclasses.replace(graph, replay=replay)

    monkeypatch.setattr(DecodeGraphs, "for_rows", for_rows)
    return replays


def generate(family: str, options: EngineOptions, **sampling: object) -> list[list[int]]:
    # Different lengths, so that rows leave one by one and every size of graph runs, with padding.
    each = [
        SamplingParams(max_tokens=NEW_TOKENS - row, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        for row in range(ROWS)
    ]
    prompts = [reference.prompt for reference in expected(family, 20)[:ROWS]]
    with LocalEngine(model_of(family), options=options) as engine:
        return [completion.tokens for completion in engine.generate(prompts, each)]


def wanted(family: str) -> list[list[int]]:
    return [reference.tokens[: NEW_TOKENS - row] for row, reference in enumerate(expected(family, 20)[:ROWS])]


@pytest.mark.parametrize(
    ("family", "poison"),
    [(family, False) for family in sorted(TINY)] + [("qwen3_next", True), ("glm_moe_dsa", True)],
)
def test_graphs_depend_on_nothing_but_what_is_refreshed(
    family: str, poison: bool, spoiled_replays: list[tuple[int, int]]
) -> None:
    """Passes are launched before the last one's tokens are read; poisoned ones go one by one."""
    assert generate(family, dataclasses.replace(OPTIONS, poison=poison)) == wanted(family)
    assert any(live < rows for live, rows in spoiled_replays)  # there was padding
    assert len({rows for _, rows in spoiled_replays}) > 1  # and more than one graph


def test_sampled_rows_go_by_graphs_too() -> None:
    eager = dataclasses.replace(OPTIONS, graphs=False)
    sampling = {"temperature": 0.7, "top_k": 20, "seed": 5}
    assert generate("qwen3_5", OPTIONS, **sampling) == generate("qwen3_5", eager, **sampling)


def test_returned_logits_are_those_of_their_own_pass() -> None:
    """Every replay writes its logits to the same memory; what a request was given stays."""
    references = expected("qwen3_5", 20)[:3]
    with LocalEngine(model_of("qwen3_5"), options=OPTIONS) as engine:
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, return_logits=True)
        completions = engine.generate([reference.prompt for reference in references], sampling)
    for reference, completion in zip(references, completions, strict=True):
        assert completion.logits is not None
        torch.testing.assert_close(completion.logits, reference.logits[:8], atol=1e-3, rtol=0)


def test_a_replaced_buffer_drops_the_graphs_that_baked_it_in(spoiled_replays: list[tuple[int, int]]) -> None:
    prompt = expected("qwen3_5", 20)[0].prompt
    with LocalEngine(model_of("qwen3_5"), options=OPTIONS) as engine:
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        before = engine.generate([prompt], sampling)[0].tokens
        for layer, buffer in engine.buffers.items():
            engine.buffers[layer] = torch.zeros_like(buffer)
        old = dict(engine._caches._layers)
        assert engine.generate([prompt], sampling)[0].tokens == before
        assert all(engine._caches[layer] is not remembered.view for layer, remembered in old.items())
        assert engine._decoder is not None
        assert not engine._decoder._graphs.stale


def test_an_aborted_row_of_a_launched_pass_is_dropped() -> None:
    reference = expected("qwen3_5", 20)
    with LocalEngine(model_of("qwen3_5"), options=OPTIONS) as engine:
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        gone, stays = engine.add(reference[0].prompt, sampling), engine.add(reference[2].prompt, sampling)
        finished = []
        for _ in range(6):
            engine.step()
        engine.abort(gone)
        while engine.busy:
            finished += [(delta.request, completion) for delta, completion in engine.step() if completion]
    [(request, completion)] = finished
    assert request == stays
    assert completion.tokens == reference[2].tokens[:12]


def test_a_capture_that_fails_leaves_no_graphs_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    capture, failures = DecodeGraphs._capture, [4]

    def failing(graphs: DecodeGraphs, size: int) -> Graph:
        if size in failures:
            raise MemoryError("no room for this size")
        return capture(graphs, size)

    monkeypatch.setattr(DecodeGraphs, "_capture", failing)
    reference, sampling = expected("qwen3_5", 20)[0], SamplingParams(max_tokens=8, ignore_eos=True)
    with LocalEngine(model_of("qwen3_5"), options=OPTIONS) as engine:
        with pytest.raises(MemoryError):
            engine.generate([reference.prompt], sampling)
        failures.clear()
        [completion] = engine.generate([reference.prompt], sampling)
    assert completion.tokens == reference.tokens[:8]


def test_layers_with_experts_do_not_start_early() -> None:
    assert inductor_options(model_of("qwen3_5"), 8) == {"triton.enable_pdl": True}
    assert inductor_options(model_of("qwen3_5_moe"), 8) == {}
    assert inductor_options(model_of("qwen3_5_moe"), 1) == {"coordinate_descent_tuning": True}


def test_products_of_one_input_are_joined_where_they_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "fits", lambda device: True)
    model = tiny_model("qwen3_5").bfloat16()
    assert isinstance(inductor_options(model, 32)["post_grad_custom_pre_pass"], JoinLinear)
    assert inductor_options(model, 33) == {"triton.enable_pdl": True}
    monkeypatch.setattr(graphs, "JOINED_PRODUCTS", False)
    assert inductor_options(model, 32) == {"triton.enable_pdl": True}


def test_a_capture_asks_for_the_layers_that_its_warm_up_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile makes a layer anew for options that differ, and a capture cannot: it would tune kernels in it."""
    monkeypatch.setattr(linear, "fits", lambda device: True)
    for family, rows in (("qwen3_5", 1), ("qwen3_5", 32), ("qwen3_5", 33), ("qwen3_5_moe", 1)):
        model = tiny_model(family).bfloat16()
        assert inductor_options(model, rows) == inductor_options(model, rows)
