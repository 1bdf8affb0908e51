"""Models of full attention alone. They need nothing but the attention entry."""

from __future__ import annotations

from typing import Any

from stepbind.models.family import Family


def _sliding_window(config: Any) -> str | None:
    return "sliding-window layers" if config.use_sliding_window else None


FAMILIES = (
    Family("Qwen3", ("qwen3",), "full attention", "Qwen3Attention", unsupported=_sliding_window),
    Family("Llama", ("llama",), "full attention", "LlamaAttention"),
)
