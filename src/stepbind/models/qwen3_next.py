"""Qwen3-Next: Gated DeltaNet and gated full attention, 3:1, with a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch

from stepbind.models.family import DeltaInputs, DeltaLayout, Family


def project(module: Any, hidden: torch.Tensor) -> DeltaInputs:
    """Two fused projections, interleaved by key head; transformers' module knows how to take them apart."""
    query, key, value, gate, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden[None]), module.in_proj_ba(hidden[None])
    )
    mixed = torch.cat([part[0].flatten(1) for part in (query, key, value)], dim=-1)
    return DeltaInputs(mixed=mixed, gate=gate[0], beta=b[0].sigmoid(), a=a[0])


FAMILIES = (
    Family(
        "Qwen3-Next",
        ("qwen3_next",),
        "Gated DeltaNet + full attention",
        attention_class="Qwen3NextAttention",
        delta=DeltaLayout("Qwen3NextGatedDeltaNet", project, norm="norm", out="out_proj"),
    ),
)
