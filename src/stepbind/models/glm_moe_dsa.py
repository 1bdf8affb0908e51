"""GLM-MoE-DSA (GLM-5): sparse latent attention where some layers attend to the tokens that an earlier one chose."""

from __future__ import annotations

from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

from stepbind.models.family import Family, LatentLayout

FAMILIES = (
    Family(
        "GLM-MoE-DSA",
        ("glm_moe_dsa",),
        "sparse latent attention, some layers sharing a choice",
        latent=LatentLayout(
            "GlmMoeDsaAttention",
            rotary=lambda config: apply_rotary_pos_emb_interleave,
            index_rotary=apply_rotary_pos_emb_interleave,
            passes_choice=True,
        ),
    ),
)
