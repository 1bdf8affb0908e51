"""A CUDA graph as RTP makes one: by the driver, past torch's own graph pool, so that nobody holds memory for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
WARMUPS = 2

Run = Callable[[], tuple[torch.Tensor, ...]]


class CudaGraph:
    """What `run` returns, captured into tensors of the host's own. `run` is called twice before, on the same inputs."""

    def __init__(self, run: Run) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._exec = ctypes.c_void_p()
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARMUPS):
                self.outputs = tuple(torch.empty_like(each) for each in run())
            torch.cuda.synchronize()
            graph, stream = ctypes.c_void_p(), ctypes.c_void_p(self._stream.cuda_stream)
            self._check(self._driver.cuStreamBeginCapture_v2(stream, THREAD_LOCAL), "cuStreamBeginCapture")
            try:
                for out, each in zip(self.outputs, run(), strict=True):
                    out.copy_(each)
            finally:
                status = self._driver.cuStreamEndCapture(stream, ctypes.byref(graph))
            self._check(status, "cuStreamEndCapture")
            status = self._driver.cuGraphInstantiateWithFlags(ctypes.byref(self._exec), graph, ctypes.c_ulonglong(0))
            self._check(status, "cuGraphInstantiate")
            self._driver.cuGraphDestroy(graph)
        torch.cuda.current_stream().wait_stream(self._stream)

    def replay(self) -> tuple[torch.Tensor, ...]:
        """The captured outputs, on the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check(self._driver.cuGraphLaunch(self._exec, stream), "cuGraphLaunch")
        return self.outputs

    @staticmethod
    def _check(status: int, call: str) -> None:
        if status:
            raise RuntimeError(f"{call}: CUDA error {status}")
