"""What every benchmark says beside its figures: the machine, the versions, the day; and tables in Markdown."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers


def heading(title: str) -> str:
    """Title, machine, versions and date."""
    lines = [
        f"# {title}",
        "",
        f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}; {_processor()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} torch threads; Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}.",
    ]
    return "\n".join(lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def median_seconds(run: Callable[[], object], *, repeats: int, warmup: int = 3) -> float:
    """Median wall time of one call."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
