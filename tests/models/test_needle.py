"""A needle in 4,000 tokens: weights built so that a question must choose one early token among 64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepbind.tiny import tiny_model
from tests.latent_runner import LatentRunner, logits_alone

CONTEXT, TOP_K = 4000, 64
NEEDLE, QUESTION, FOUND, MISSING = 250, 251, 252, 253


def needle_model(top_k: int) -> Any:
    """DeepSeek-V3.2 of one layer. Hidden element 0 marks the needle, 1 the question, 2 carries what attention found.

    The index key's last element is the needle's mark; the question's index query asks for it among noise. Attention is
    uniform over what is chosen and its value is the needle's mark, so that the needle weighs 1/64 where it is chosen
    among 64 tokens, and 1/4000 in dense attention. FOUND is the best token where element 2 beats element 1.
    """
    model = tiny_model("deepseek_v32", num_hidden_layers=1, mlp_layer_types=["dense"], index_topk=top_k)
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layer, embedding = model.model.layers[0], model.get_input_embeddings().weight
    attention, indexer = layer.self_attn, layer.self_attn.indexer
    with torch.no_grad():
        for parameter in (model.lm_head.weight, *layer.mlp.parameters(), *attention.parameters()):
            if parameter.dim() == 2:  # the norms stay
                parameter.zero_()
        embedding[:, :4] = 0
        embedding[[NEEDLE, QUESTION]] = 0
        embedding[NEEDLE, 0] = embedding[QUESTION, 1] = 1
        indexer.wk.weight[:-1, 4:] = noise(indexer.head_dim - 1, 60)
        indexer.wk.weight[-1, 0] = 1
        attention.q_a_proj.weight[0, 1] = 1
        by_head = indexer.wq_b.weight.view(indexer.n_heads, indexer.head_dim, -1)
        by_head[:, :-1, 0] = 0.2 * noise(indexer.n_heads, indexer.head_dim - 1)
        by_head[:, -1, 0] = 1
        indexer.weights_proj.weight[:, 1] = 1
        attention.kv_a_proj_with_mqa.weight[0, 0] = 1
        attention.kv_a_proj_with_mqa.weight[1:32, 4:] = noise(31, 60)
        attention.kv_b_proj.weight.view(4, 32, 32)[:, 16, 0] = 1  # the first value element of each head
        attention.o_proj.weight.view(64, 4, 16)[2, :, 0] = 10
        model.lm_head.weight[FOUND, 2] = model.lm_head.weight[MISSING, 1] = 1
    return model


def answer(model: Any, ids: torch.Tensor) -> int:
    """The token after a prefill in chunks of 512 and one decode, which is the question."""
    runner = LatentRunner(model, [ids], block_size=64, ratio=4)
    while runner.done[0] < CONTEXT - 1:
        runner.run([min(512, CONTEXT - 1 - runner.done[0])])
    return int(runner.run([1])[0][-1].argmax())


def haystack(needle_at: int | None) -> torch.Tensor:
    ids = torch.randint(0, 250, (CONTEXT,), generator=torch.Generator().manual_seed(1))
    ids[-1] = QUESTION
    if needle_at is not None:
        ids[needle_at] = NEEDLE
    return ids


@pytest.mark.parametrize("needle_at", [0, 123])
def test_the_needle_is_chosen_and_found(needle_at: int) -> None:
    assert answer(needle_model(TOP_K), haystack(needle_at)) == FOUND


def test_without_a_needle_it_is_missing() -> None:
    assert answer(needle_model(TOP_K), haystack(None)) == MISSING


def test_dense_attention_would_not_find_it() -> None:
    assert answer(needle_model(CONTEXT), haystack(123)) == MISSING


def test_transformers_finds_it_too() -> None:
    assert int(logits_alone(needle_model(TOP_K), haystack(123))[-1].argmax()) == FOUND
