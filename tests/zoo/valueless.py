"""A device that answers no question, for what must not wait for a GPU.

Tensors on torch's meta device have shapes and no values: reading one back (`.item()`, `tolist`, a truth value, a copy
to the host) raises, and so does all whose shape hangs on values (`nonzero`, a Boolean mask as an index). Those are the
operations that make a host wait for its GPU. Kernels are counted instead of launched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime.jit import KernelInterface

from stepbind import CacheGroup, Caches
from stepbind.hosts.local.memory import allocate_buffers
from stepbind.layers import discover_layers
from stepbind.models import attention, gated_delta
from stepbind.ops import gated_delta as ops_gated_delta
from stepbind.ops import triton_attention, triton_cache_write, triton_causal_conv
from stepbind.plan import fill_triton
from stepbind.step import BlockTable, Lengths, Step
from tests.zoo.harness import hybrid

DEVICE = torch.device("meta")


def valueless_model(layers: int = 2) -> Any:
    return copy.deepcopy(hybrid(layers)).to(DEVICE)


def valueless_caches(model: Any, groups: tuple[CacheGroup, ...]) -> Caches:
    layers = discover_layers(model)
    return Caches.of(groups, {layer.index: layer.spec for layer in layers}, allocate_buffers(layers, groups, DEVICE))


def valueless(step: Step) -> Step:
    """The step as a host says it that has tables, and its lengths too, on the device."""

    def lengths(of: Lengths) -> Lengths:
        return Lengths(of.host, torch.empty(of.host.size, dtype=torch.int32, device=DEVICE))

    return dataclasses.replace(
        step,
        query_len=lengths(step.query_len),
        prior_len=lengths(step.prior_len),
        tables=tuple(BlockTable(each.group, each.blocks.to(DEVICE), each.granularity) for each in step.tables),
        position=None if step.position is None else step.position.to(DEVICE),
    )


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the Triton kernels launched from now on. Layers call the ops that a GPU runs."""
    launches: list[str] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: launches.append(kernel.fn.__name__)

    monkeypatch.setattr(KernelInterface, "__getitem__", launcher)
    monkeypatch.setattr(fill_triton, "compiled_for", lambda kernel, *arguments: kernel)
    monkeypatch.setattr(attention, "paged_attention", triton_attention.paged_attention)
    monkeypatch.setattr(attention, "write_kv", triton_cache_write.write_kv)
    monkeypatch.setattr(gated_delta, "causal_conv", triton_causal_conv.causal_conv)
    monkeypatch.setattr(gated_delta, "gated_delta", ops_gated_delta._on_gpu)
    return launches
