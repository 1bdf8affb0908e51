"""Kernels that start before their predecessors have ended give what they give one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from stepbind.ops import triton_pdl
from stepbind.ops.linear import ARRIVALS, few_rows_linear, joined_linear

WIDTH, LAYERS = 2048, 6


def chain(x: torch.Tensor, weights: list[torch.Tensor], arrived: torch.Tensor) -> torch.Tensor:
    """Products with norms and gates between them, as layers have; a gate reads a result that is two kernels old."""
    for gate, up, down in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
        normed = rms_norm(x, (WIDTH,))
        gated, raised = joined_linear(normed, [gate, up], [None, None], arrived)
        x = x + few_rows_linear(silu(gated) * raised, down, None, arrived)
    return x


def replays(run: Callable[..., torch.Tensor], rows: int) -> list[torch.Tensor]:
    """Results of a captured chain on changing inputs, replayed back to back."""
    generator = torch.Generator("cuda").manual_seed(rows)
    shape = {"dtype": torch.bfloat16, "device": "cuda", "generator": generator}
    weights = [torch.randn(WIDTH, WIDTH, **shape) / WIDTH**0.5 for _ in range(3 * LAYERS)]  # type: ignore[call-overload]
    inputs = torch.randn(20, rows, WIDTH, **shape)  # type: ignore[call-overload]
    arrived, x = torch.zeros(ARRIVALS, dtype=torch.int32, device="cuda"), inputs[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(2):
            run(x, weights, arrived)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        out = run(x, weights, arrived)
    results = []
    for each in inputs:
        x.copy_(each)
        graph.replay()
        results.append(out.clone())
    assert not arrived.any()
    return results


@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_chain_of_early_kernels_reads_nothing_too_soon(
    rows: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(early: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(triton_pdl, "ENABLED", early)
        if not compiled:
            return replays(chain, rows)
        torch._dynamo.reset()
        return replays(torch.compile(chain, dynamic=False, options={"triton.enable_pdl": early}), rows)

    for one_by_one, early in zip(run(False), run(True), strict=True):
        assert torch.isfinite(early).all()
        # torch.compile may choose other reductions; what is read too soon comes from another input altogether.
        torch.testing.assert_close(early, one_by_one, atol=0.1 * compiled, rtol=0.05 * compiled)
