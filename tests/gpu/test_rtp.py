"""RTP's runtime on a GPU: real graphs, captured by the driver as RTP does, replayed on what RTP refreshes and poison.

Tokens are transformers' own, on the CPU.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from stepbind.layers import discover_layers
from stepbind.step import Phase
from tests.hosts.rtp_double.host import RtpDouble, host_groups
from tests.hosts.rtp_double.inputs import Row
from tests.hosts.test_rtp_end_to_end import (
    expected_of,
    external_package,  # noqa: F401  # a fixture of every test here
    model_of,
    prompts_of,
    runtime_of,
)

COUNT, LONGEST, NEW_TOKENS = 5, 70, 40
MAX_CONTEXT = LONGEST + NEW_TOKENS


@functools.lru_cache(maxsize=2)
def gpu_model(family: str, device: str) -> Any:
    return copy.deepcopy(model_of(family, 2)).to(device)


class Served:
    """A tiny model behind the double."""

    def __init__(
        self, family: str, generation: str, sizes: tuple[int, int], *, graphs: bool, device: str = "cuda"
    ) -> None:
        model = gpu_model(family, device)
        layers = discover_layers(model)
        blocks = 3 * COUNT * (-(-MAX_CONTEXT // sizes[0]) + 1)
        self.runtime = runtime_of(model, 8, MAX_CONTEXT)
        self.host = RtpDouble(
            self.runtime,
            layers,
            host_groups(layers, 2, *sizes, blocks),
            generation,
            token_budget=48,
            max_rows=8,
            max_context=MAX_CONTEXT,
            graph_sizes=(1, 2, 4, 8) if graphs else (),
            device=device,
        )

    def __enter__(self) -> RtpDouble:
        return self.host

    def __exit__(self, *_: object) -> None:
        self.runtime.close()


@pytest.mark.parametrize("sizes", [(64, 16), (16, 16)], ids=str)
@pytest.mark.parametrize(
    ("family", "generation"), [("llama", "older"), ("qwen3_5", "older"), ("qwen3_5", "newer"), ("qwen3_5_moe", "newer")]
)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_greedy_tokens_equal_transformers(family: str, generation: str, graphs: bool, sizes: tuple[int, int]) -> None:
    with Served(family, generation, sizes, graphs=graphs) as host:
        tokens = host.generate(prompts_of(COUNT, LONGEST), NEW_TOKENS)
    assert tokens == expected_of(family, 2, COUNT, LONGEST, NEW_TOKENS)


def test_what_others_allocate_is_not_memory_of_a_captured_pass() -> None:
    """A replay gives the same hidden states after everything that torch hands out was filled with NaN. Its rows write
    the same keys and values to the same slots."""
    with Served("llama", "older", (16, 16), graphs=True) as host, torch.inference_mode():
        prompt = prompts_of(COUNT, LONGEST)[1][:20]
        host.forward(Phase.PREFILL, [Row(prompt, 0, [[1, 2], [1, 2]])])
        rows = [Row([7], len(prompt), [[1, 2], [1, 2]])]
        before = host.forward(Phase.DECODE, rows).clone()
        assert before.isfinite().all()
        spoiled = [torch.full((2**size,), torch.nan, device="cuda") for size in range(22) for _ in range(16)]
        torch.cuda.synchronize()
        assert torch.equal(host.forward(Phase.DECODE, rows), before)
        del spoiled
