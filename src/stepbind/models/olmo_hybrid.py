"""Olmo-Hybrid: Gated DeltaNet whose state may have negative eigenvalues, and full attention, 3:1."""

from __future__ import annotations

from typing import Any

import torch

from stepbind.models.family import DeltaInputs, DeltaLayout, Family


def project(module: Any, hidden: torch.Tensor) -> DeltaInputs:
    """A projection for each input; beta reaches 2 where negative eigenvalues are allowed."""
    return DeltaInputs(
        query=module.q_proj(hidden).unflatten(-1, (-1, module.head_k_dim)),
        key=module.k_proj(hidden).unflatten(-1, (-1, module.head_k_dim)),
        value=module.v_proj(hidden).unflatten(-1, (-1, module.head_v_dim)),
        gate=module.g_proj(hidden).unflatten(-1, (-1, module.head_v_dim)),
        b=module.b_proj(hidden),
        a=module.a_proj(hidden),
        beta_scale=2.0 if module.allow_neg_eigval else 1.0,
    )


FAMILIES = (
    Family(
        "Olmo-Hybrid",
        ("olmo_hybrid",),
        "Gated DeltaNet + full attention",
        attention_class="OlmoHybridAttention",
        delta=DeltaLayout("OlmoHybridGatedDeltaNet", project, "o_norm", "OlmoHybridRMSNormGated", out="o_proj"),
    ),
)
