"""Block tables at the granularity that ATOM's fields have: physical blocks, and kernel blocks for the indexer."""

from __future__ import annotations

from functools import lru_cache

import torch

from stepbind.step import Granularity


def to_physical(table: torch.Tensor, ratio: int, granularity: Granularity, out: torch.Tensor | None) -> torch.Tensor:
    """[B, C] physical ids of a kernel table: every ratio-th column divided by the ratio, -1 kept (seed behaviour 4).
    One in physical blocks stays as it is. `out`: where to, in a captured pass."""
    if ratio == 1 or granularity is Granularity.PHYSICAL:
        return table
    # -1 // ratio is -1.
    return torch.div(table[:, ::ratio], ratio, rounding_mode="floor", out=out)


def to_kernel(table: torch.Tensor, ratio: int, out: torch.Tensor | None) -> torch.Tensor:
    """[B, C * ratio] kernel ids of a physical table, -1 kept (seed behaviour 5)."""
    if ratio == 1:
        return table
    inner = _upto(ratio, table.device)
    expanded = None if out is None else out.view(*table.shape, ratio)
    expanded = torch.add(inner, table[..., None], alpha=ratio, out=expanded)
    return expanded.clamp_(min=-1).flatten(1)  # -1 became -ratio .. -1


@lru_cache(maxsize=64)
def _upto(count: int, device: torch.device) -> torch.Tensor:
    """0 .. count-1, int32; nobody writes to it."""
    return torch.arange(count, dtype=torch.int32, device=device)
