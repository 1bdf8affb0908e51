"""The fill and the ops on random tables, and on tables of nothing but garbage, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 python -m tests.gpu.memcheck

Under pytest each kernel of each test would be compiled and watched, which takes many minutes. Here a few seeds have
every kernel; torch's allocator then gives each tensor memory of its own, so that a step outside of one is seen. Exits
with an error where a result is wrong, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time

import torch

from stepbind.step import Phase
from tests.fill_checks import check_fill, on_device, poisoned_arena, with_garbage_tables
from tests.garbage_checks import check_delta_decode_garbage, check_paged_garbage, check_state_garbage
from tests.latent_checks import LatentShape, check_garbage_touches_nothing_outside, check_latent_attention
from tests.op_checks import (
    Shape,
    check_attention,
    check_convolution,
    check_delta_decode,
    check_few_rows_linear,
    check_gated_delta,
)
from tests.random_steps import bounded_step, random_step


def check_all(device: str, seeds: int) -> None:
    """Raises AssertionError where a kernel's result is not the reference's."""
    for seed in range(8 * seeds):
        make = bounded_step if seed % 4 == 3 else random_step
        for step in (make(seed), with_garbage_tables(make(seed), seed)):
            there = on_device(step, device, device_lengths=seed % 2 == 0, contexts=seed % 4 == 0)
            check_fill(there, poisoned_arena(there))
    for phase, seed in itertools.product(Phase, range(seeds)):
        check_attention(seed, phase, Shape(), device)
        check_convolution(seed, phase, Shape(), device)
        check_gated_delta(seed, phase, Shape(), device)
        check_latent_attention(seed, phase, LatentShape(), device)
        check_garbage_touches_nothing_outside(seed, phase, LatentShape(), device)
        check_paged_garbage(seed, phase, Shape(), device)
        check_state_garbage(seed, phase, Shape(), device)
    for seed in range(seeds):
        check_delta_decode(seed, Shape(), device)
        check_delta_decode_garbage(seed, Shape(), device)
        for rows, in_features in ((1, 160), (3, 512)):
            check_few_rows_linear(seed, rows, (100, 7), in_features, torch.float16, device)
        check_attention(seed, Phase.DECODE, dataclasses.replace(Shape(), contexts=12), device)  # in several parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu with TRITON_INTERPRET=1, to see that it runs")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    began = time.monotonic()
    check_all(given.device, given.seeds)
    print(f"all as the references, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
