"""The RTP double serves every family through the external package, and its tokens are transformers' own."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from stepbind.layers import discover_layers
from stepbind.tiny import TINY, tiny_model
from tests.hosts.rtp_double.host import RtpDouble, host_groups
from tests.hosts.rtp_double.modules import rtp_llm_installed

SIX_LAYERS: dict[str, Any] = {"num_hidden_layers": 6}
EIGHT_LAYERS = {"num_hidden_layers": 8, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2}
PER_LAYER = {
    "layer_types": {"qwen3": ["full_attention"] * 6, "else": ["indexed_attention"] * 6},
    "mlp_layer_types": {"else": ["dense"] + ["sparse"] * 5},
    "indexer_types": {"else": ["full", "shared", "full", "full", "shared", "shared"]},
}
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")


@pytest.fixture(scope="module", autouse=True)
def external_package() -> Iterator[dict[str, Any]]:
    with rtp_llm_installed() as registered:
        yield registered


@functools.lru_cache(maxsize=2)
def model_of(family: str, groups: int) -> Any:
    """Two and one group: the usual tiny model; six: one with enough layers."""
    if groups < 6:
        return tiny_model(family)
    overrides = dict(EIGHT_LAYERS if family in HYBRIDS else SIX_LAYERS)
    for name, kinds in PER_LAYER.items():
        if name in TINY[family]().to_dict() and name not in overrides:
            overrides[name] = kinds[family] if family in kinds else kinds["else"]
    return tiny_model(family, **overrides)


def prompts_of(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(longest)
    lengths = [1, longest] + [rng.randint(2, longest) for _ in range(count - 2)]
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@functools.lru_cache(maxsize=4)
def expected_of(family: str, groups: int, count: int, longest: int, new_tokens: int) -> list[list[int]]:
    """transformers' greedy tokens, one prompt at a time.

    In a padded batch its numbers round otherwise, and an indexer between equal scores then chooses another token.
    """
    model, sizes = model_of(family, groups), {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    expected: list[list[int]] = []
    for prompt in prompts_of(count, longest):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=-1, **sizes)
        expected.append(out[0, len(prompt) :].tolist())
    return expected


TIE = 1e-6
"""Index scores closer than this round to either order, by the shape of the batch that they are computed in. Among some
20,000 choices of a case of the whole grid one may be so close, and all behind it is another text then."""


def closest_choice(model: Any, ids: list[int]) -> float:
    """The smallest distance, in transformers, from the last index score that is chosen to the first that is not."""
    closest, top_k = math.inf, torch.Tensor.topk

    def watched(scores: torch.Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        nonlocal closest
        if scores.shape[-2:] == (len(ids), len(ids)) and k < len(ids):  # not an expert's
            best = top_k(scores, k + 1, dim=dim).values[..., k:, -2:].double()
            closest = min(closest, float((best[..., 0] - best[..., 1]).min()))
        return top_k(scores, k, dim=dim, **options)

    with patch.object(torch.Tensor, "topk", watched), torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    return closest


def runtime_of(model: Any, max_rows: int, max_context: int) -> Any:
    from stepbind.hosts.rtp_llm.models.model import hand_over_weights
    from stepbind.hosts.rtp_llm.models.runtime import StepbindRuntime
    from tests.hosts.rtp_double.modules import ModelWeights

    weight = ModelWeights(1, "cpu", torch.float32)
    hand_over_weights(weight, model)
    config = SimpleNamespace(max_seq_len=max_context)
    return StepbindRuntime(config, None, weight, max_rows, causal_model=model)


def assert_serves(
    family: str,
    generation: str,
    graphs: bool,
    groups: int,
    sizes: tuple[int, int],
    *,
    count: int = 5,
    longest: int = 70,
    new_tokens: int = 40,
    budget: int = 48,
) -> None:
    model = model_of(family, groups)
    layers = discover_layers(model)
    max_context = longest + new_tokens
    blocks = 3 * count * (-(-max_context // sizes[0]) + 1)
    runtime = runtime_of(model, 8, max_context)
    host = RtpDouble(
        runtime,
        layers,
        host_groups(layers, groups, *sizes, blocks),
        generation,
        token_budget=budget,
        max_rows=8,
        max_context=max_context,
        graph_sizes=(1, 2, 4, 8) if graphs else (),
    )
    prompts = prompts_of(count, longest)
    generated = host.generate(prompts, new_tokens)
    runtime.close()  # the model is transformers' own again
    expected, ties = expected_of(family, groups, count, longest, new_tokens), 0
    for prompt, got, want in zip(prompts, generated, expected, strict=True):
        if got != want:
            same = next(index for index in range(new_tokens) if got[index] != want[index])
            closest = closest_choice(model, prompt + want[:same])
            assert closest < TIE, f"token {same} behind {len(prompt)} is {got[same]}, not {want[same]}"
            ties += 1
    assert ties <= 1


SIZES = ((64, 16), (64, 64), (16, 16))
FAMILIES = sorted(TINY)


# Each family with two groups and with six; generation, graphs and sizes take turns. All of them: the whole grid.
def cases() -> Iterator[tuple[str, str, bool, int, tuple[int, int]]]:
    for index, family in enumerate(FAMILIES):
        for turn, groups in enumerate((2, 6), start=index):
            yield family, ("older", "newer")[turn % 2], turn // 2 % 2 == 0, groups, SIZES[turn % 3]


@pytest.mark.parametrize(("family", "generation", "graphs", "groups", "sizes"), list(cases()))
def test_greedy_tokens_equal_transformers(
    family: str, generation: str, graphs: bool, groups: int, sizes: tuple[int, int]
) -> None:
    assert_serves(family, generation, graphs, groups, sizes)


@pytest.mark.parametrize("generation", ["older", "newer"])
@pytest.mark.parametrize(("family", "sizes"), [("llama", (16, 16)), ("qwen3_5", (16, 16)), ("qwen3_5", (64, 16))])
def test_one_group_of_all_layers(family: str, sizes: tuple[int, int], generation: str) -> None:
    assert_serves(family, generation, True, 1, sizes)


def test_blocks_of_1024_tokens_in_kernel_blocks_of_16() -> None:
    """A prompt of more than two blocks in chunks that end inside them, and a decode across the third boundary."""
    sizes = {"count": 2, "longest": 3060, "new_tokens": 20, "budget": 700}
    assert_serves("qwen3_5", "newer", False, 2, (1024, 16), **sizes)


@pytest.mark.full
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("groups", [2, 6])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("generation", ["older", "newer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_on_the_whole_grid(
    family: str, generation: str, graphs: bool, groups: int, sizes: tuple[int, int]
) -> None:
    assert_serves(family, generation, graphs, groups, sizes, count=12, longest=150, new_tokens=140)
