"""Qwen3.5 (text), dense and mixture of experts: Gated DeltaNet and gated full attention, 3:1."""

from __future__ import annotations

from typing import Any

import torch

from stepbind.models.family import DeltaInputs, DeltaLayout, Family


def project(module: Any, hidden: torch.Tensor) -> DeltaInputs:
    """One projection each for queries, keys and values together, the gate, beta and the decay."""
    mixed = module.in_proj_qkv(hidden)
    query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    return DeltaInputs(
        query=query.unflatten(-1, (-1, module.head_k_dim)),
        key=key.unflatten(-1, (-1, module.head_k_dim)),
        value=value.unflatten(-1, (-1, module.head_v_dim)),
        gate=module.in_proj_z(hidden).unflatten(-1, (-1, module.head_v_dim)),
        b=module.in_proj_b(hidden),
        a=module.in_proj_a(hidden),
        joined=mixed,
    )


FAMILIES = (
    Family(
        "Qwen3.5",
        ("qwen3_5_text",),
        "Gated DeltaNet + full attention",
        attention_class="Qwen3_5Attention",
        delta=DeltaLayout("Qwen3_5GatedDeltaNet", project, "norm", "Qwen3_5RMSNormGated", out="out_proj"),
    ),
    Family(
        "Qwen3.5-MoE",
        ("qwen3_5_moe_text",),
        "Gated DeltaNet + full attention",
        attention_class="Qwen3_5MoeAttention",
        delta=DeltaLayout("Qwen3_5MoeGatedDeltaNet", project, "norm", "Qwen3_5MoeRMSNormGated", out="out_proj"),
    ),
)
