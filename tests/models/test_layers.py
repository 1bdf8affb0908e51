"""Every family's layers are found with their numbers, kinds and cache layouts; anything else is a clear error."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from stepbind import GroupKind, StepError, UnknownModelError, adapted, discover_layers
from stepbind.caches import KVSpec, StateSpec
from stepbind.models.family import families
from stepbind.tiny import TINY, tiny_model

HYBRID = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"]


@pytest.mark.parametrize("family", HYBRID)
def test_a_hybrid_has_both_kinds_in_its_order(family: str) -> None:
    layers = discover_layers(tiny_model(family))
    state, attention = GroupKind.STATE, GroupKind.ATTENTION
    assert [(layer.index, layer.kind) for layer in layers] == [(0, state), (1, state), (2, state), (3, attention)]
    assert layers[0].spec == StateSpec(4, 16, 16, 4, 2 * 32 + 64, torch.float32, torch.float32)
    assert layers[3].spec == KVSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)
    assert layers[3].name == "model.layers.3.self_attn"


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_dense_model_has_attention_alone(family: str) -> None:
    layers = discover_layers(tiny_model(family))
    assert [(layer.index, layer.kind) for layer in layers] == [(i, GroupKind.ATTENTION) for i in range(3)]


def test_cache_dtypes_follow_the_weights_and_the_state_stays_float32() -> None:
    state, *_, attention = discover_layers(tiny_model("qwen3_5").bfloat16())
    assert isinstance(state.spec, StateSpec)
    assert (state.spec.state_dtype, state.spec.conv_dtype) == (torch.float32, torch.bfloat16)
    assert isinstance(attention.spec, KVSpec)
    assert attention.spec.dtype is torch.bfloat16


def test_every_known_family_has_a_tiny_checkpoint_to_be_tested_with() -> None:
    known = {model_type for family in families() for model_type in family.model_types}
    assert {config().model_type for config in TINY.values()} == known


def test_an_unknown_model_is_told_what_is_known() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10))
    with pytest.raises(UnknownModelError, match=r"model type: got 'gpt2', expected one of Qwen3-Next \(qwen3_next\), "):
        discover_layers(model)
    with pytest.raises(UnknownModelError, match="model type: got 'Linear'"):
        discover_layers(torch.nn.Linear(2, 2))


def test_a_sliding_window_is_refused_and_not_ignored() -> None:
    model = tiny_model("qwen3")
    model.config.use_sliding_window = True
    with pytest.raises(UnknownModelError, match="Qwen3 model: got sliding-window layers, expected full attention"):
        discover_layers(model)


def test_a_layer_number_given_twice_is_refused() -> None:
    model = tiny_model("qwen3_5")
    model.model.layers[1].linear_attn.layer_idx = 0
    with pytest.raises(StepError, match=r"layer 0: got both model.layers.0.linear_attn and model.layers.1.linear_attn"):
        discover_layers(model)


def test_a_model_without_layers_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(StepError, match="got LlamaForCausalLM without context-reading layers, expected modules"):
        discover_layers(model)


@pytest.mark.parametrize("family", sorted(TINY))
def test_the_model_is_plain_transformers_again_afterwards(family: str) -> None:
    model = tiny_model(family)
    ids = torch.arange(20)[None]
    implementation = model.config._attn_implementation
    with torch.no_grad():
        before = model(ids).logits
        with adapted(model), adapted(model):
            assert model.config._attn_implementation == "stepbind"
        torch.testing.assert_close(model(ids).logits, before, atol=0, rtol=0)
    assert model.config._attn_implementation == implementation
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_a_module_had_of_its_own_is_put_back() -> None:
    """Libraries that hook a module set `forward` on the instance."""
    model = tiny_model("qwen3_5")
    module = model.model.layers[0].linear_attn
    own = module.forward = lambda *args, **kwargs: torch.zeros(1)
    with adapted(model):
        assert module.forward is not own
    assert module.forward is own
