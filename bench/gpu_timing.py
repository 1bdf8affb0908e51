"""Measuring on a GPU: host time of a call, GPU time inside a graph, and what the profiler saw of a call."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], Any]


def require_gpu() -> None:
    """Leave with a message where there is nothing to measure."""
    if not torch.cuda.is_available():
        sys.exit("This measures a GPU and found none (torch.cuda.is_available() is false).")


def machine() -> str:
    import triton

    device = torch.cuda.get_device_properties(0)
    return (
        f"{device.name}, {device.multi_processor_count} multiprocessors, {device.total_memory / 2**30:.0f} GiB; "
        f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"CUDA {torch.version.cuda}"
    )


def host_us(work: Work) -> float:
    """Median host time of a call to return, in us. The GPU is idle before each call."""
    return host_us_in_turn([work])[0]


def host_us_in_turn(works: list[Work], *, repeat: int = 200, warmup_s: float = 0.3) -> list[float]:
    """`host_us` of several works, measured one after the other in every round and warmed up for some seconds together,
    so that they can be compared: a machine's pace drifts, and a process is slower in its first second."""
    end = time.perf_counter() + warmup_s
    while time.perf_counter() < end:
        for work in works:
            work()
        torch.cuda.synchronize()
    times: list[list[int]] = [[] for _ in works]
    for _ in range(repeat):
        for work, of_work in zip(works, times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            work()
            of_work.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    return [statistics.median(of_work) / 1000 for of_work in times]


def graph_us(works: list[Work], *, repeat: int = 20, rounds: int = 1) -> float:
    """GPU time of one of `works` inside a graph that runs all of them `rounds` times, in us: median over replays.

    Several works on buffers of their own keep the cache from holding what a real step would have to read.
    """
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for work in works:
                work()
    times = []
    for _ in range(repeat + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(stop)))
    return float(statistics.median(times[2:])) * 1000 / (rounds * len(works))


@dataclass(frozen=True)
class Counts:
    """What one call did. `gpu_us`: time that its kernels and copies took on the GPU."""

    launches: int
    copies: int
    device_to_host: int
    syncs: int
    allocations: int
    gpu_us: float


SYNCS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def counts(work: Work) -> Counts:
    """Counts of one call, after warm-up, from torch's profiler and allocator."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        torch.cuda.synchronize()
    events = profiler.events() or []
    on_gpu = [event for event in events if str(event.device_type) == "DeviceType.CUDA"]
    copies = [event for event in on_gpu if event.name.startswith("Mem")]
    return Counts(
        launches=len(on_gpu) - len(copies),
        copies=len(copies),
        device_to_host=sum("DtoH" in event.name for event in copies),
        syncs=sum(event.name in SYNCS for event in events),
        allocations=allocations,
        gpu_us=sum(event.device_time for event in on_gpu),
    )


def copy_bytes_per_us() -> float:
    """Device memory bandwidth of a large copy, bytes read and written, in bytes per us.

    By a kernel that also turns the sign: a plain copy in a graph is the copy engine's, which is slower.
    """
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    us = graph_us([lambda: torch.neg(source, out=target)], rounds=4)
    return 2 * source.numel() * source.element_size() / us
