"""Olmo-Hybrid: Gated DeltaNet whose state may have negative eigenvalues, and full attention, 3:1."""

from __future__ import annotations

from typing import Any

import torch

from stepbind.models.family import DeltaInputs, DeltaLayout, Family


def project(module: Any, hidden: torch.Tensor) -> DeltaInputs:
    """A projection for each input; beta reaches 2 where negative eigenvalues are allowed."""
    beta = module.b_proj(hidden).sigmoid()
    return DeltaInputs(
        mixed=torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], dim=-1),
        gate=module.g_proj(hidden).unflatten(-1, (-1, module.head_v_dim)),
        beta=beta * 2.0 if module.allow_neg_eigval else beta,
        a=module.a_proj(hidden),
    )


FAMILIES = (
    Family(
        "Olmo-Hybrid",
        ("olmo_hybrid",),
        "Gated DeltaNet + full attention",
        attention_class="OlmoHybridAttention",
        delta=DeltaLayout("OlmoHybridGatedDeltaNet", project, norm="o_norm", out="o_proj"),
    ),
)
