"""These tests run Triton kernels in its interpreter, on CPU tensors. With a GPU, tests/gpu runs the kernels themselves
and these are left out: one process can have only one of the two."""

from __future__ import annotations

import torch

collect_ignore_glob = ["test_*.py"] if torch.cuda.is_available() else []
