"""Qwen3.5 (text), dense and mixture of experts: Gated DeltaNet and gated full attention, 3:1."""

from __future__ import annotations

from typing import Any

import torch

from stepbind.models.family import DeltaInputs, DeltaLayout, Family


def project(module: Any, hidden: torch.Tensor) -> DeltaInputs:
    """One projection each for queries, keys and values together, the gate, beta and the decay."""
    return DeltaInputs(
        mixed=module.in_proj_qkv(hidden),
        gate=module.in_proj_z(hidden).unflatten(-1, (-1, module.head_v_dim)),
        beta=module.in_proj_b(hidden).sigmoid(),
        a=module.in_proj_a(hidden),
    )


FAMILIES = (
    Family(
        "Qwen3.5",
        ("qwen3_5_text",),
        "Gated DeltaNet + full attention",
        attention_class="Qwen3_5Attention",
        delta=DeltaLayout("Qwen3_5GatedDeltaNet", project, norm="norm", out="out_proj"),
    ),
    Family(
        "Qwen3.5-MoE",
        ("qwen3_5_moe_text",),
        "Gated DeltaNet + full attention",
        attention_class="Qwen3_5MoeAttention",
        delta=DeltaLayout("Qwen3_5MoeGatedDeltaNet", project, norm="norm", out="out_proj"),
    ),
)
