"""These tests run Triton kernels in its interpreter, on CPU tensors. With a GPU, tests/gpu runs the kernels themselves
and these are left out: one process can have only one of the two."""

from __future__ import annotations

import os

import torch

collect_ignore_glob: list[str] = []
if torch.cuda.is_available():
    collect_ignore_glob.append("test_*.py")
else:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined
