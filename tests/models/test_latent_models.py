"""Latent-attention models through `bind`, chunk by chunk, equal transformers' own full forward."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from stepbind.bind import bind
from stepbind.errors import StepError
from stepbind.models.latent import latent_forward
from stepbind.plan import build_plan
from stepbind.tiny import tiny_model
from tests.latent_runner import LatentRunner, logits_alone, random_ids

FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")


def assert_equals_transformers(runner: LatentRunner, chunks: list[list[int]], *, padding: int = 0) -> None:
    expected = [logits_alone(runner.model, ids) for ids in runner.ids]
    for chunk in chunks:
        start = list(runner.done)
        for row, logits in runner.run(chunk, padding=padding).items():
            torch.testing.assert_close(
                logits,
                expected[row][start[row] : runner.done[row]],
                rtol=0,
                atol=1e-3,
                msg=lambda m, r=row: f"{r}: {m}",
            )
    assert runner.done == [len(ids) for ids in runner.ids]


def random_chunks(lengths: list[int], budget: int, seed: int) -> list[list[int]]:
    """Passes as an engine makes them: some rows' prompts up to `budget` tokens, or one token for each of some rows."""
    rng, left, chunks = random.Random(seed), list(lengths), []
    while any(left):
        chunk = [0] * len(left)
        alive = [row for row, count in enumerate(left) if count]
        if rng.random() < 0.5:
            for row in rng.sample(alive, rng.randint(1, len(alive))):
                chunk[row] = 1
        else:
            room = budget
            for row in rng.sample(alive, len(alive)):
                chunk[row] = min(room, left[row], rng.randint(1, budget))
                room -= chunk[row]
        left = [count - taken for count, taken in zip(left, chunk, strict=True)]
        chunks.append(chunk)
    return chunks


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("block_size", "ratio", "top_k", "budget"), [(16, 4, 16, 64), (64, 1, 64, 256), (16, 1, 16, 7)]
)
def test_chunks_of_rows_equal_the_model_alone(
    family: str, block_size: int, ratio: int, top_k: int, budget: int
) -> None:
    overrides = {} if family == "deepseek_v3" else {"index_topk": top_k}
    lengths = [top_k - 1, top_k, top_k + 1, 4 * top_k, 1]
    runner = LatentRunner(tiny_model(family, **overrides), random_ids(lengths), block_size=block_size, ratio=ratio)
    assert_equals_transformers(runner, random_chunks(lengths, budget, seed=top_k), padding=3 if ratio > 1 else 0)


def test_half_split_rotary_embeddings_and_queries_of_full_rank() -> None:
    for overrides in ({"rope_interleave": False}, {"q_lora_rank": None}):
        runner = LatentRunner(tiny_model("deepseek_v3", **overrides), random_ids([40, 21]))
        assert_equals_transformers(runner, [[30, 2], [9, 1], [1, 18]])


def test_stretched_rotary_embeddings_scale_the_scores() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale_all_dim": 1.0}
    yarn |= {"mscale": 1.0, "rope_theta": 10000.0, "beta_fast": 32, "beta_slow": 1}
    runner = LatentRunner(tiny_model("deepseek_v32", rope_parameters=yarn), random_ids([60, 21]))
    assert runner.layers[0].module.scaling == pytest.approx(24**-0.5 * (0.1 * math.log(4.0) + 1.0) ** 2)
    assert_equals_transformers(runner, [[50, 2], [9, 1], [1, 18]])


@pytest.mark.parametrize("types", [["full", "shared", "shared"], ["full", "full", "shared"]])
def test_layers_that_share_a_choice_use_the_last_one_made(types: list[str]) -> None:
    runner = LatentRunner(tiny_model("glm_moe_dsa", indexer_types=types), random_ids([70, 33]))
    held = [runner.pages(layer).index_key is not None for layer in range(3)]
    assert held == [kind == "full" for kind in types]
    assert_equals_transformers(runner, [[40, 20], [1, 1], [29, 12]])


def test_a_layer_that_shares_a_choice_nobody_made_is_an_error() -> None:
    runner = LatentRunner(tiny_model("glm_moe_dsa"), random_ids([20]))
    module = runner.layers[1].module
    hidden, angles = torch.randn(1, 20, 64), (torch.ones(1, 20, 8), torch.zeros(1, 20, 8))
    plan = build_plan(runner.step([20])[0], runner.arena)
    with bind(plan, runner.caches, runner.model), pytest.raises(StepError, match="layer 1 choice of tokens: got none"):
        module(hidden, position_embeddings=angles)


def test_sparse_models_need_their_choice() -> None:
    """The test before would pass without an indexer if the tiny models did not depend on what it leaves out."""
    model = tiny_model("deepseek_v32")
    ids = random_ids([64])[0]
    sparse = logits_alone(model, ids)
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 64
    dense = logits_alone(model, ids)
    assert (sparse[:16] - dense[:16]).abs().max() < 1e-3
    assert (sparse[17:] - dense[17:]).abs().max() > 0.1


def test_a_bfloat16_model_keeps_bfloat16_latents_and_index_keys() -> None:
    model = tiny_model("deepseek_v32").bfloat16()
    runner = LatentRunner(model, random_ids([40, 20]))
    for layer in range(3):
        assert runner.pages(layer).latent.dtype == torch.bfloat16
        index_key = runner.pages(layer).index_key
        assert index_key is not None
        assert index_key.dtype == torch.bfloat16
    whole = torch.cat([runner.run([30, 10])[0], runner.run([9, 9])[0], runner.run([1, 1])[0]])
    assert whole.shape == (40, 257)
    assert whole.dtype == torch.bfloat16


def test_the_batch_must_be_flat() -> None:
    runner = LatentRunner(tiny_model("deepseek_v3"), random_ids([8]))
    plan = build_plan(runner.step([8])[0], runner.arena)
    with bind(plan, runner.caches, runner.model), pytest.raises(StepError, match=r"layer 0 hidden_states: got shape"):
        runner.model(torch.zeros(2, 4, dtype=torch.long), use_cache=False)


def forwards_of(model: Any) -> list[Any]:
    return [vars(layer.self_attn).get("forward") for layer in model.model.layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_plain_transformers_again_after_a_bind(family: str) -> None:
    model = tiny_model(family)
    runner, ids = LatentRunner(model, random_ids([40])), random_ids([40])[0]
    before = logits_alone(model, ids)
    plan = build_plan(runner.step([40])[0], runner.arena)
    with pytest.raises(ZeroDivisionError), bind(plan, runner.caches, model):  # noqa: PT012
        assert all(forward.func is latent_forward for forward in forwards_of(model))
        raise ZeroDivisionError
    assert forwards_of(model) == [None, None, None]
    assert torch.equal(logits_alone(model, ids), before)
