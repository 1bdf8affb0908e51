"""Mixtures of experts inside a captured pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def has_experts(model: Any) -> bool:
    """Whether any of the model's layers is a mixture of experts."""
    return any(type(module).__name__.endswith("Experts") for module in model.modules())


@contextmanager
def capturable_experts(model: Any) -> Iterator[None]:
    """Experts by an implementation that a capture can hold: transformers' "eager" one looks at the routing on the host,
    and its "grouped_mm" one does for float32, which the grouped product has no GPU kernel for."""
    before = model.config._experts_implementation
    if before == "batched_mm" or (before == "grouped_mm" and model.dtype is not torch.float32):
        yield
        return
    if not has_experts(model):
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)
