"""RTP-LLM's `ModelConfig` from a transformers configuration: what RTP needs to size its cache, and no more.

RTP never runs these layers itself, so nothing of their arithmetic (rotary, norms, experts) is said here.
"""

from __future__ import annotations

from typing import Any

import torch
from rtp_llm.ops import HybridAttentionType


def fill_config(config: Any, text: Any) -> None:
    """Set the fields of RTP's `config` from the text configuration `text` of a checkpoint."""
    config.num_layers = text.num_hidden_layers
    config.hidden_size = text.hidden_size
    config.vocab_size = text.vocab_size
    config.max_seq_len = text.max_position_embeddings
    config.tie_word_embeddings = bool(text.tie_word_embeddings)
    config.compute_dtype = text.dtype or torch.bfloat16
    attention = config.attn_config
    attention.head_num = text.num_attention_heads
    attention.kv_head_num = text.num_key_value_heads
    fields = text.to_dict()
    if fields.get("kv_lora_rank"):
        _fill_latent(attention, text)
    else:
        attention.size_per_head = fields.get("head_dim") or text.hidden_size // text.num_attention_heads
    if "linear_num_value_heads" in fields:
        _fill_linear(config, text)


def _fill_latent(attention: Any, text: Any) -> None:
    attention.use_mla = True
    attention.kv_lora_rank = text.kv_lora_rank
    attention.rope_head_dim = text.qk_rope_head_dim
    attention.nope_head_dim = text.qk_nope_head_dim
    attention.v_head_dim = text.v_head_dim
    attention.size_per_head = text.qk_nope_head_dim + text.qk_rope_head_dim
    attention.kv_head_num = 1  # one latent a token, shared by all heads


def _fill_linear(config: Any, text: Any) -> None:
    config.hybrid_attention_config.enable_hybrid_attention = True
    config.hybrid_attention_config.hybrid_attention_types = [
        HybridAttentionType.LINEAR if kind == "linear_attention" else HybridAttentionType.NONE
        for kind in text.layer_types
    ]
    linear = config.linear_attention_config
    linear.linear_conv_kernel_dim = text.linear_conv_kernel_dim
    linear.linear_key_head_dim = text.linear_key_head_dim
    linear.linear_num_key_heads = text.linear_num_key_heads
    linear.linear_num_value_heads = text.linear_num_value_heads
    linear.linear_value_head_dim = text.linear_value_head_dim
