"""Every kernel compiles ahead of time for the GPUs that it is written for, and fits them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.triton.compile_kernels import SHARED_BYTES, TARGETS

KERNELS = {
    "fill_decode",
    "fill_ragged",
    "_write_kv",
    "_attend_split",
    "_merge_splits",
    "_attend_query_tile",
    "_convolve_decode",
    "_convolve_tokens",
    "_leave_states",
    "_recurrent_gated_delta",
    "_delta_decode",
    "_multiply_vectors",
    "_multiply_tiles",
    "_gather_states",
    "_scatter_states",
    "_write_tokens",
    "_attend_latents",
    "_score_tokens",
    "_best_positions",
}


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_kernel_compiles_and_its_shared_memory_fits(target: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton.compile_kernels", target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in compiled} == KERNELS
    assert [line for line in compiled if line["shared"] > SHARED_BYTES[target]] == []
