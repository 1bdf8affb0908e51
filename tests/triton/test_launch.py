"""Launches of compiled kernels: what reaches Triton's launcher, and when it is left to Triton."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.compiler.compiler import CompiledKernel

from stepbind.plan import launch


class Kernel(CompiledKernel):  # type: ignore[misc]
    """Handles of nothing, that note their calls."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.direct: list[tuple[Any, ...]] = []
        self.by_triton: list[tuple[Any, ...]] = []

    @property
    def run(self) -> Callable[..., None]:
        return lambda *arguments: self.direct.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.by_triton.append((grid, *arguments))

    def __del__(self) -> None:
        pass


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    stream_of = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: f"stream of {device}"))
    monkeypatch.setattr(launch, "driver", stream_of)
    return Kernel()


def launch_once(kernel: Kernel) -> None:
    launch.launch_on(kernel, (3, 4, 5), torch.device("cuda", 1))("descriptor", 6, 7)


def test_launches_are_made_as_this_triton_makes_them() -> None:
    """Where it fails, a newer Triton launches in another way. They are left to it then, which costs some us each."""
    assert launch._runs_so()


def test_the_last_call_alone_is_made_on_the_devices_current_stream(kernel: Kernel) -> None:
    launch_once(kernel)
    want = (3, 4, 5, "stream of 1", "function", "metadata", None, None, None, "descriptor", 6, 7)
    assert (kernel.direct, kernel.by_triton) == ([want], [])


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_hears_launches(name: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, listener = getattr(knobs.runtime, name), lambda metadata: None
    if hasattr(hook, "add"):
        hook.add(listener)
        launch_once(kernel)
        hook.remove(listener)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, name, listener)
            launch_once(kernel)
    launch_once(kernel)
    assert (len(kernel.by_triton), len(kernel.direct)) == (1, 1)


def test_another_way_of_launching_is_left_to_triton(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_runs_so", lambda: False)
    launch_once(kernel)
    assert (kernel.direct, kernel.by_triton) == ([], [((3, 4, 5), "descriptor", 6, 7)])
