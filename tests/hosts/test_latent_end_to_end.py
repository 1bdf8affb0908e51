"""Latent-attention models on the local host equal transformers' own generation, token for token."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch

from stepbind.errors import StepError
from stepbind.hosts.local import EngineOptions, LocalEngine
from stepbind.hosts.local.poison import Poison
from stepbind.hosts.local.request import SamplingParams
from stepbind.tiny import tiny_model

NEW_TOKENS = 20  # past a boundary of 16-token blocks, wherever the prompt ends
SPARSE = ("deepseek_v32", "glm_moe_dsa")


@functools.lru_cache(maxsize=1)
def model_of(family: str, top_k: int) -> Any:
    return tiny_model(family, **({"index_topk": top_k} if family in SPARSE else {}))


def prompts_of(top_k: int, count: int) -> list[list[int]]:
    """Of 1 .. 300 tokens, the lengths around top-k and four times it among them."""
    rng = random.Random(top_k)
    lengths = [1, top_k - 1, top_k, top_k + 1, 4 * top_k, 300]
    lengths += [rng.randint(1, 300) for _ in range(count - len(lengths))]
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@functools.lru_cache(maxsize=1)
def expected_of(family: str, top_k: int, count: int) -> list[tuple[list[int], torch.Tensor]]:
    """transformers' greedy tokens and their logits, one prompt at a time."""
    model, expected = model_of(family, top_k), []
    for prompt in prompts_of(top_k, count):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=-1,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected.append((out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)))
    return expected


def assert_equals_transformers(family: str, top_k: int, count: int, options: EngineOptions) -> None:
    expected = expected_of(family, top_k, count)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, return_logits=True)
    with LocalEngine(model_of(family, top_k), options=options) as engine:
        completions = engine.generate(prompts_of(top_k, count), sampling)
    for index, (completion, (tokens, logits)) in enumerate(zip(completions, expected, strict=True)):
        assert completion.tokens == tokens, f"prompt {index} of {len(completion.prompt)} tokens"
        assert completion.logits is not None
        difference = (completion.logits - logits).abs().max()
        assert difference < 1e-3, f"prompt {index} of {len(completion.prompt)} tokens: logits {difference} apart"


def options_of(block_size: int, ratio: int, budget: int) -> EngineOptions:
    """16 rows in flight, over pools in which every block that nobody owns holds NaN before and after each pass."""
    return EngineOptions(
        block_size=block_size,
        kernel_block_size=block_size // ratio,
        token_budget=budget,
        max_rows=16,
        cache_tokens=4096,
        poison=True,
    )


@pytest.mark.parametrize(
    ("family", "top_k", "block_size", "ratio", "budget"),
    [
        ("deepseek_v3", 16, 64, 4, 64),
        ("deepseek_v32", 16, 16, 4, 64),
        ("deepseek_v32", 64, 64, 1, 256),
        ("glm_moe_dsa", 64, 16, 1, 256),
        ("glm_moe_dsa", 16, 64, 4, 7),
    ],
)
def test_greedy_tokens_equal_transformers(family: str, top_k: int, block_size: int, ratio: int, budget: int) -> None:
    assert_equals_transformers(family, top_k, 20, options_of(block_size, ratio, budget))


def test_poison_watches_index_keys_too() -> None:
    with LocalEngine(model_of("glm_moe_dsa", 16), options=options_of(16, 1, 64)) as engine:
        poison = Poison(engine.groups, engine.buffers, engine.index_buffers)
        assert sorted(engine.index_buffers) == [0, 2]  # layer 1 attends to what layer 0 chose
        poison.before([])
        poison.after()
        engine.index_buffers[2][5, 3, 0] = 0
        with pytest.raises(StepError, match="layer 2: got a write to block 5"):
            poison.after()


GRID = list(itertools.product((16, 64), (1, 4), (7, 64, 256)))


@pytest.mark.full
@pytest.mark.parametrize("sizes", GRID, ids=lambda sizes: "block{}-ratio{}-budget{}".format(*sizes))
@pytest.mark.parametrize(("family", "top_k"), [("deepseek_v3", 16), *itertools.product(SPARSE, (16, 64))])
def test_greedy_tokens_equal_transformers_on_the_whole_grid(
    family: str, top_k: int, sizes: tuple[int, int, int]
) -> None:
    assert_equals_transformers(family, top_k, 200, options_of(*sizes))
