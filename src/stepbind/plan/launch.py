"""Launches of a compiled kernel in little of the host's time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from stepbind.plan import fill_kernels as kernels


@dataclass(frozen=True, eq=False)
class Call:
    """The kernel on a grid, and its last arguments. Those before them: a descriptor (`pointer_to`), the addresses of
    query_len and prior_len, [num_rows] int32, and num_rows."""

    launch: Callable[..., None]
    arguments: tuple[int | bool, ...]


def compiled_for(kernel: Any, warps: int, *arguments: Any) -> Any:
    """The kernel, compiled for such arguments; `[grid]` makes a call of it that launches it.

    A compiled kernel's own call skips what a JIT call does each time: binding, specialising and looking itself up.
    It takes the same arguments, and none of them is specialised on here but the descriptor's alignment, so that one
    serves all sizes. Compiles for the current device, which is the arena's wherever a forward runs.
    """
    if not isinstance(kernel, JITFunction):  # Triton's interpreter
        return kernel
    return kernel.warmup(*arguments, grid=(1, 1, 1), num_warps=warps)


_RUN = """self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, launch_metadata,
    knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args)"""


@lru_cache(maxsize=1)
def _runs_so() -> bool:
    """Whether a launch in this Triton is the call `_RUN`, by its own source."""
    return " ".join(_RUN.split()) in " ".join(inspect.getsource(CompiledKernel.__getitem__).split())


def launch_on(compiled: Any, grid: tuple[int, int, int], device: torch.device) -> Callable[..., None]:
    """`compiled[grid]`, of which this makes the last call alone: what that looks up before it takes 3 of 10 us on an
    H200's host. Where this Triton does it in another way, and while a profiler listens to launches, it is left to
    Triton.
    """
    by_triton: Callable[..., None] = compiled[grid]
    if not isinstance(compiled, CompiledKernel) or not _runs_so():
        return by_triton
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream_of, hooks, (x, y, z) = driver.active.get_current_stream, knobs.runtime, grid

    def launch(*arguments: Any) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # Each is None, or a function, or a chain with a list of them.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            by_triton(*arguments)
        else:
            run(x, y, z, stream_of(device.index), function, metadata, None, None, None, *arguments)

    return launch


def pointer_to(descriptor: torch.Tensor) -> Any:
    """What a `Call` takes for it: the address, which a compiled kernel's call takes in less time than a tensor."""
    return descriptor.data_ptr() if isinstance(kernels.fill_decode, JITFunction) else descriptor
