"""Tiny random checkpoints of every family: enough to prove equality, small enough for any laptop.

Their text means nothing. Weights are drawn wide enough that the best token stands clear of the second best.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    GlmMoeDsaConfig,
    LlamaConfig,
    OlmoHybridConfig,
    PreTrainedTokenizerFast,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

END_OF_TEXT = "<|end|>"
VOCAB_SIZE = 257  # every byte, and the end

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": VOCAB_SIZE - 1,
}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 4,
}
# Wider weights make these two amplify rounding to 5e-4 of a logit, which is as much as the closest tokens are apart.
_CALM: dict[str, Any] = {"initializer_range": 0.08}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_LATENT: dict[str, Any] = {
    **{name: value for name, value in _COMMON.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
# So many heads that hardly any score is exactly zero in all: transformers' choice among equal scores is not specified.
_INDEXER: dict[str, Any] = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 16}

TINY: dict[str, Callable[[], Any]] = {
    "qwen3_next": lambda: Qwen3NextConfig(**_COMMON, **_LINEAR, **_EXPERTS),
    "qwen3_5": lambda: Qwen3_5TextConfig(**_COMMON | _CALM, **_LINEAR),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**_COMMON | _CALM, **_LINEAR, **_EXPERTS),
    "olmo_hybrid": lambda: OlmoHybridConfig(**_COMMON, **_LINEAR),
    "deepseek_v3": lambda: DeepseekV3Config(**_LATENT),
    "deepseek_v32": lambda: DeepseekV32Config(**_LATENT, **_INDEXER),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(**_LATENT, **_INDEXER, indexer_types=["full", "shared", "full"]),
    "qwen3": lambda: Qwen3Config(**_COMMON, num_hidden_layers=3),
    "llama": lambda: LlamaConfig(**_COMMON, num_hidden_layers=3),
}
"""Configurations by family name."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)} | {END_OF_TEXT: VOCAB_SIZE - 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model of a family (a key of `TINY`); `overrides` replace fields of its configuration."""
    config = TINY[family]()
    for name, value in overrides.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=0.25)
        model.get_input_embeddings().weight.normal_(std=1.0)
    return model.eval()


def save_tiny(family: str, directory: Path, *, seed: int = 0, **overrides: Any) -> None:
    """Write a tiny checkpoint with its byte tokenizer, as `save_pretrained` does."""
    tiny_model(family, seed=seed, **overrides).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
