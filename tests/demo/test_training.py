"""What the training script has of its own is what transformers computes."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from stepbind.demo.stories import Part, story_pieces

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import demo_data
import demo_models
import demo_sparse
import demo_step


def test_the_chunked_delta_rule_is_transformers_own() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 128, 3, 16, requires_grad=True) for _ in range(3))
    g, beta = -torch.rand(2, 128, 3, requires_grad=True), torch.rand(2, 128, 3)
    ours, _ = demo_models.chunk_delta_rule(query, key, value, g=g, beta=beta)
    theirs, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    of_ours = torch.autograd.grad(ours.square().sum(), [query, key, value])
    of_theirs = torch.autograd.grad(theirs.square().sum(), [query, key, value])
    torch.testing.assert_close(of_ours, of_theirs, atol=1e-5, rtol=1e-4)


def test_the_convolution_is_transformers_own() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 8, 20), torch.randn(8, 4)
    theirs = modeling_qwen3_5.causal_conv1d_fn(hidden, weight, None, activation="silu")
    torch.testing.assert_close(demo_models.convolve(hidden, weight), theirs, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def sparse_model() -> Any:
    """Small, with weights wide enough that no two scores are close."""
    config = demo_models.sparse_mla_config().to_dict() | {"index_topk": 8, "initializer_range": 0.1}
    torch.manual_seed(0)
    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig.from_dict(config)).eval()


def logits_of(model: Any, how: str | None) -> torch.Tensor:
    ids = torch.randint(0, 1000, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if how is None:
            return model(ids, use_cache=False).logits  # type: ignore[no-any-return]
        with demo_sparse.attending(model, how):
            return model(ids, use_cache=False).logits  # type: ignore[no-any-return]


def test_sparse_training_attends_to_what_transformers_chooses(sparse_model: Any) -> None:
    torch.testing.assert_close(
        logits_of(sparse_model, demo_sparse.SPARSE), logits_of(sparse_model, None), atol=1e-4, rtol=1e-3
    )


def test_dense_training_attends_to_everything(sparse_model: Any) -> None:
    dense, indexed = (logits_of(sparse_model, how) for how in (demo_sparse.DENSE, demo_sparse.INDEXED))
    torch.testing.assert_close(dense, indexed)
    assert (dense - logits_of(sparse_model, None)).abs().max() > 0.01
    for layer in sparse_model.model.layers:
        layer.self_attn.indexer.index_topk = 40
    torch.testing.assert_close(dense, logits_of(sparse_model, None), atol=1e-4, rtol=1e-3)
    for layer in sparse_model.model.layers:
        layer.self_attn.indexer.index_topk = 8


def test_only_the_indexers_learn_from_their_loss(sparse_model: Any) -> None:
    ids = torch.randint(0, 1000, (1, 32), generator=torch.Generator().manual_seed(2))
    with demo_sparse.attending(sparse_model, demo_sparse.INDEXED):
        sparse_model(ids, use_cache=False)
        demo_sparse.indexer_loss(sparse_model).backward()
    trained = {id(weight) for weight in demo_sparse.indexer_weights(sparse_model)}
    for name, weight in sparse_model.named_parameters():
        assert (weight.grad is not None and bool(weight.grad.any())) == (id(weight) in trained), name


def test_tokens_of_words_are_the_tokens_of_the_whole() -> None:
    tokenizer = demo_data.make_tokenizer(0)
    encode = demo_data.Encoder(tokenizer)
    assert len(tokenizer) <= demo_data.VOCAB_SIZE
    for seed in range(20):
        pieces = story_pieces(random.Random(seed), 0.4, characters=3000)
        text = "".join(piece.text for piece in pieces)
        ids = [token for piece in pieces for token in encode(piece.text)]
        assert ids == tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text


def test_a_row_of_stories_is_full_and_marks_what_is_asked_for() -> None:
    tokenizer = demo_data.make_tokenizer(0)
    rows = demo_data.Stories(tokenizer, 0, 100, 4, 200, 0.4)
    for index in range(4):
        ids, parts = rows[index]
        assert ids.shape == parts.shape == (201,)
        text = tokenizer.decode(ids)
        whole = [line for line in text.split("\n")[:-1] if line.startswith("A:")]
        asked = tokenizer.decode(ids[parts == Part.VALUE]).split()
        for line in whole:
            for value in re.findall(r"\d+", line) or [line.removesuffix(".").split(" ")[-1]]:
                assert asked.pop(0) == value
        assert len(asked) <= 3  # of an answer that the row cuts off


def test_queries_start_as_the_keys_of_the_same_input() -> None:
    model = demo_models.new_model("hybrid", 0, "cpu")
    hidden = torch.randn(5, model.config.hidden_size)
    layer = model.model.layers[1].self_attn
    queries = layer.q_proj(hidden).unflatten(-1, (-1, 2, layer.head_dim))[..., 0, :]
    keys = layer.k_proj(hidden).unflatten(-1, (-1, layer.head_dim)).repeat_interleave(layer.num_key_value_groups, dim=1)
    torch.testing.assert_close(queries, keys)


def test_some_states_start_with_a_memory_of_hundreds_of_tokens() -> None:
    model = demo_models.new_model("hybrid", 0, "cpu")
    layers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    kept = torch.stack([(-layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias)).exp() for layer in layers])
    assert kept.max() > 0.99
    assert kept.min() > 0.1


def test_each_head_of_sparse_mlas_first_layer_starts_by_looking_at_one_token_before() -> None:
    model = demo_models.new_model("sparse-mla", 0, "cpu")
    shares: dict[int, torch.Tensor] = {}  # by layer: of each head's attention, from the longest row's last token

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        shares[module.layer_idx] = (query @ key.transpose(-1, -2) * scaling)[0, :, -1].softmax(-1)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        ).transpose(1, 2), None

    AttentionInterface.register("demo_spy", spy)
    with torch.no_grad(), demo_sparse.attending(model, demo_sparse.DENSE):
        model.config._attn_implementation = "demo_spy"
        ids = torch.randint(0, 1000, (1, demo_models.CONTEXT), generator=torch.Generator().manual_seed(3))
        masks = dict.fromkeys(model.config.layer_types, torch.zeros(1, 1, 1, 1))
        model(ids, attention_mask=masks, use_cache=False)
    for head, share in enumerate(shares[0]):
        assert share[-2 - head] > 0.6
    assert max(shares[layer][:, -5:-1].max().item() for layer in (1, 2, 3)) < 0.5


def test_all_heads_of_that_layer_start_by_saying_the_same_of_a_token() -> None:
    layer = demo_models.new_model("sparse-mla", 0, "cpu").model.layers[0].self_attn
    latent = torch.randn(3, layer.kv_lora_rank)
    values = layer.kv_b_proj(latent).unflatten(-1, (layer.num_heads, -1))[..., layer.qk_nope_head_dim :]
    said = torch.einsum("thv,dhv->htd", values, layer.o_proj.weight.unflatten(1, (layer.num_heads, -1)))
    torch.testing.assert_close(said, said[:1].expand_as(said))


def test_muon_moves_every_direction_of_a_matrix_alike() -> None:
    torch.manual_seed(0)
    for shape in ((3, 8, 16), (2, 16, 8)):
        singular = torch.linalg.svdvals(demo_step.orthogonal(torch.randn(shape)))
        assert singular.min() > 0.5
        assert singular.max() < 1.5


def test_a_step_lowers_the_loss_that_it_reports() -> None:
    torch.manual_seed(0)
    layer, target = torch.nn.Linear(8, 8), torch.randn(8, 8)

    def loss(ids: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = (layer.weight - target).square().mean() + layer.bias.square().mean()
        return found, found.detach()[None]

    step = demo_step.Step(loss, list(layer.parameters()), layer.weight, 1, 1)
    ids = parts = torch.zeros(1, 2, dtype=torch.long)
    first = step(ids, parts, 0.1).item()
    for _ in range(100):
        last = step(ids, parts, 0.1).item()
    assert last < first / 10


def test_all_experts_weighed_are_transformers_own(sparse_model: Any) -> None:
    ways = []
    for way in ("eager", demo_models.EVERY_EXPERT):
        sparse_model.config._experts_implementation = way
        ways.append(logits_of(sparse_model, None))
    torch.testing.assert_close(*ways, atol=1e-5, rtol=1e-4)
