"""The two checkpoints that come with the package."""

from __future__ import annotations

from pathlib import Path

from stepbind.errors import StepError

CHECKPOINTS = ("hybrid", "sparse-mla")
"""Qwen3.5's text layers (three Gated DeltaNet to one attention), and GLM-MoE-DSA's (sparse latent attention)."""


def checkpoint_path(name: str) -> Path:
    """Directory of a checkpoint in transformers' format. Raises `StepError` for a name that is none of CHECKPOINTS."""
    if name not in CHECKPOINTS:
        raise StepError("checkpoint", repr(name), f"one of {', '.join(CHECKPOINTS)}")
    return Path(__file__).parent / "checkpoints" / name
