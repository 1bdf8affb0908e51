"""Programmatic dependent launch: a kernel that starts while the one before it still runs, and waits for its results.

It hides a launch, and what a kernel does before it needs those results. A kernel that is launched so must call
`wait_for_inputs` before it touches anything that kernels write; only weights may be read before. It lets its own
successor start after that wait, never before: the kernels that torch.compile makes rely on everything but their direct
predecessor being complete.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without NVIDIA's part: `launches_early` is false there
    gdc_launch_dependents = gdc_wait = None

ENABLED = True
"""False starts every kernel when the one before it has ended, to compare."""


def launches_early(device: torch.device) -> bool:
    """Whether kernels are launched so: on NVIDIA GPUs since Hopper (sm_90)."""
    return ENABLED and device.type == "cuda" and _can_launch_early(device)


def launch_options(early: bool) -> dict[str, bool]:
    """What a kernel's launch takes beside its grid."""
    return {"launch_pdl": True} if early else {}


@cache
def _can_launch_early(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Return when all kernels before this one are complete and what they wrote is visible."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def ask_for(pointers):
    """Have the cache lines at pointers brought into the GPU's cache, without waiting for them. For weights alone, and
    for NVIDIA."""
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [pointers], tl.int32, is_pure=False, pack=1)
