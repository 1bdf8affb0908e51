"""Qwen3-Next: Gated DeltaNet and gated full attention, 3:1, with a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch

from stepbind.models.family import DeltaInputs, DeltaLayout, Family


def project(module: Any, hidden: torch.Tensor) -> DeltaInputs:
    """Two fused projections, interleaved by key head; transformers' module knows how to take them apart."""
    batch = hidden[None]  # once, so that both read the same tensor
    query, key, value, gate, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(batch), module.in_proj_ba(batch)
    )
    return DeltaInputs(query=query[0], key=key[0], value=value[0], gate=gate[0], b=b[0], a=a[0])


FAMILIES = (
    Family(
        "Qwen3-Next",
        ("qwen3_next",),
        "Gated DeltaNet + full attention",
        attention_class="Qwen3NextAttention",
        delta=DeltaLayout("Qwen3NextGatedDeltaNet", project, "norm", "Qwen3NextRMSNormGated", out="out_proj"),
    ),
)
