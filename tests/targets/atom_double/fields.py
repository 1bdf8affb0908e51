"""What stands in a context, for comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch

from stepbind.targets.atom.usual_tables import UsualGroups


def values_in(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and numbers of a context by where they stand, as (dtype, values), through objects and containers; the
    host's own objects and the caches are left out."""
    if isinstance(found, torch.Tensor):
        yield name, (found.dtype, found.tolist())
    elif isinstance(found, dict):
        for key, value in found.items():
            yield from values_in(value, f"{name}[{key}]")
    elif hasattr(found, "_asdict"):
        yield from values_in(found._asdict(), name)
    elif isinstance(found, UsualGroups):
        yield from values_in(tuple(found), name)
    elif isinstance(found, tuple) and any(not isinstance(each, int) for each in found):
        for index, value in enumerate(found):
            yield from values_in(value, f"{name}[{index}]")
    elif isinstance(found, (int, float, str, tuple, Enum, type(None))):
        yield name, found
    elif hasattr(found, "__dict__"):
        for field, value in vars(found).items():
            if field not in ("rtp_attn_inputs", "kv_cache_data", "mla_layer_map"):
                yield from values_in(value, f"{name}.{field}")
