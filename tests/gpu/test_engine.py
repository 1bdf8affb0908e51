"""On a GPU the local host generates what transformers generates on the CPU, eagerly and by graphs with padding."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from stepbind import EngineOptions, LocalEngine, SamplingParams
from stepbind.hosts.local.request import Completion
from stepbind.tiny import TINY, tiny_model
from tests.hosts.reference import expected

ROWS, NEW_TOKENS = 33, 40
OPTIONS = EngineOptions(block_size=16, token_budget=256, max_rows=40, cache_tokens=16384, keep_state_every=2)
GRAPH_ROWS = (1, 8, 16, 32, 40)  # never the number of live rows for long: there is always padding


@cache
def gpu_model(family: str) -> Any:
    return tiny_model(family).cuda()


def generate(family: str, options: EngineOptions, *, return_logits: bool = False) -> list[Completion]:
    reference = expected(family, ROWS, NEW_TOKENS)
    # Different lengths, so that rows leave one by one.
    sampling = [
        SamplingParams(max_tokens=NEW_TOKENS - row, ignore_eos=True, return_logits=return_logits) for row in range(ROWS)
    ]
    with LocalEngine(gpu_model(family), options=options) as engine:
        return engine.generate([each.prompt for each in reference], sampling)


def assert_as_transformers(family: str, completions: list[Completion]) -> None:
    for want, got in zip(expected(family, ROWS, NEW_TOKENS), completions, strict=True):
        assert got.tokens == want.tokens[: len(got.tokens)]
        if got.logits is not None:
            torch.testing.assert_close(got.logits, want.logits[: len(got.tokens)], atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", sorted(TINY))
def test_eager_passes_equal_transformers(family: str) -> None:
    options = dataclasses.replace(OPTIONS, graphs=False, poison=True)
    assert_as_transformers(family, generate(family, options, return_logits=True))


@pytest.mark.parametrize("family", sorted(TINY))
def test_graphs_equal_transformers(family: str) -> None:
    options = dataclasses.replace(OPTIONS, graphs=True, graph_rows=GRAPH_ROWS)
    assert_as_transformers(family, generate(family, options))


@pytest.mark.parametrize("family", sorted(TINY))
def test_poisoned_graphs_equal_transformers_to_the_logit(family: str) -> None:
    options = dataclasses.replace(OPTIONS, graphs=True, graph_rows=GRAPH_ROWS, poison=True)
    assert_as_transformers(family, generate(family, options, return_logits=True))


@pytest.mark.parametrize(("family", "compiled"), [("qwen3_5", False), ("qwen3", False), ("qwen3_5", True)])
def test_bfloat16_stays_within_its_own_error(family: str, compiled: bool) -> None:
    """Logits of a bfloat16 model by graphs are as far from the float32 model's as transformers' bfloat16 ones are."""
    wanted = expected(family, 4, NEW_TOKENS)
    rough = copy.deepcopy(gpu_model(family)).bfloat16()
    options = dataclasses.replace(OPTIONS, graphs=True, graph_rows=GRAPH_ROWS)
    if compiled:
        options = dataclasses.replace(options, graph_rows=(1,), max_rows=4, compile_layers=True)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, return_logits=True)
    with LocalEngine(rough, options=options) as engine:
        completions = engine.generate([each.prompt for each in wanted], sampling)
    for got in completions:
        ids = torch.tensor([got.prompt + got.tokens], device="cuda")
        start = len(got.prompt) - 1
        with torch.no_grad():
            theirs = rough(ids, use_cache=False).logits[0, start:-1].float().cpu()
            exact = gpu_model(family)(ids, use_cache=False).logits[0, start:-1].cpu()
        assert got.logits is not None
        assert (got.logits - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 0.05


def test_compiled_layers_equal_transformers() -> None:
    options = dataclasses.replace(OPTIONS, graphs=True, graph_rows=(), compile_layers=True)
    assert_as_transformers("qwen3_5", generate("qwen3_5", options))
