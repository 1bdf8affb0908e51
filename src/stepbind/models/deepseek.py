"""DeepSeek-V3: latent attention, dense. DeepSeek-V3.2: the same with an indexer in every layer."""

from __future__ import annotations

from typing import Any

from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

from stepbind.models.family import Family, LatentLayout, Rotary


def _rotary_of(config: Any) -> Rotary:
    return apply_rotary_pos_emb_interleave if config.rope_interleave else apply_rotary_pos_emb  # type: ignore[no-any-return]


FAMILIES = (
    Family("DeepSeek-V3", ("deepseek_v3",), "latent attention", latent=LatentLayout("DeepseekV3Attention", _rotary_of)),
    Family(
        "DeepSeek-V3.2",
        ("deepseek_v32",),
        "sparse latent attention",
        latent=LatentLayout(
            "DeepseekV32Attention",
            rotary=lambda config: apply_rotary_pos_emb_interleave,
            index_rotary=apply_rotary_pos_emb,
        ),
    ),
)
