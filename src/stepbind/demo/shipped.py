"""The checkpoints that come with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from stepbind.errors import StepError

SHIPPED = ("hybrid", "sparse-mla")
"""hybrid: Gated DeltaNet and full attention, Qwen3.5's text model. sparse-mla: GLM-MoE-DSA, latent attention over what
an indexer chooses."""


def shipped_checkpoint(name: str) -> Path:
    """The directory of a shipped checkpoint, in transformers' format.

    Raises `StepError` for a name that is none of SHIPPED, and where the files are not there.
    """
    if name not in SHIPPED:
        raise StepError("checkpoint", repr(name), f"one of {', '.join(SHIPPED)}")
    directory = Path(str(resources.files("stepbind.demo"))) / "checkpoints" / name
    if not (directory / "config.json").is_file():
        expected = f"its files in {directory}: an installed wheel, or what tools/train_demo.py makes"
        raise StepError("checkpoint", f"{name!r}, which is not there", expected)
    return directory
