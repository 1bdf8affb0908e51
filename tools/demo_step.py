"""One step of training: gradients, Muon and AdamW, on a GPU replayed as one CUDA graph.

Models of this size take less time than their launches do: a step of a few thousand launches takes several times as
long eagerly as in a graph. torch's own Muon bakes its rate into a graph and walks matrix by matrix; the one here
takes the rate from the GPU, and all matrices of a shape at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch

Loss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From ids and parts [rows, tokens + 1] to what is minimised, and figures to report (float32 [n])."""

WARM_STEPS = 3
"""Steps taken eagerly before one is captured: kernels get tuned, and optimizers make their state."""
MOMENTUM, WEIGHT_DECAY = 0.95, 0.1
SLOWER = 0.3
"""AdamW's rate as a share of Muon's."""


class Muon:
    """Momentum with orthogonal updates (K. Jordan, "Muon", 2024), as large as AdamW's (arXiv 2502.16982, section 2.2).

    weights: matrices, or stacks of matrices. rate: float32 scalar on their device, read at every step.
    """

    def __init__(self, weights: list[torch.Tensor], rate: torch.Tensor) -> None:
        by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for weight in weights:
            by_shape[weight.shape].append(weight)
        self._rate = rate
        self._groups = [(group, torch.zeros_like(torch.stack(group))) for group in by_shape.values()]

    @torch.no_grad()
    def step(self) -> None:
        for weights, momentum in self._groups:
            grad = torch.stack([weight.grad for weight in weights if weight.grad is not None])
            momentum.lerp_(grad, 1 - MOMENTUM)
            size = 0.2 * math.sqrt(max(grad.shape[-2:]))
            update = orthogonal(grad.lerp(momentum, MOMENTUM)) * (self._rate * size)
            keep = 1 - self._rate * WEIGHT_DECAY
            for weight, change in zip(weights, update.unbind(), strict=True):
                weight.mul_(keep).sub_(change)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Of each matrix [..., rows, columns] nearly the closest one with equal singular values: 5 Newton-Schulz steps,
    with Muon's coefficients."""
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.transpose(-1, -2)
    found = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    found = found.bfloat16() if found.is_cuda else found
    for _ in range(5):
        square = found @ found.transpose(-1, -2)
        found = 3.4445 * found + (-4.7750 * square + 2.0315 * square @ square) @ found
    whole: torch.Tensor = found if wide is matrices else found.transpose(-1, -2)
    return whole.to(matrices.dtype)


def half_precision(device: torch.device) -> torch.autocast:
    """Products in bfloat16 on a GPU; CPUs take longer for those. A weight is cast at every use: a cast kept from an
    earlier pass would not follow its weight inside a graph."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def is_matrix(weight: torch.Tensor) -> bool:
    """Whether Muon is for it: not for norms and decays, nor for a convolution's taps [channels, 1, taps]."""
    return weight.ndim >= 2 and min(weight.shape[-2:]) > 1


class Step:
    """`loss` minimised over `weights`, batches all of one shape. Figures are those of the step before the update."""

    def __init__(
        self, loss: Loss, weights: list[torch.Tensor], embedding: torch.Tensor, rows: int, length: int
    ) -> None:
        device = embedding.device
        self._loss, self._weights = loss, weights
        self._ids = torch.zeros(rows, length + 1, dtype=torch.long, device=device)
        self._parts = torch.zeros_like(self._ids)
        self._rate, self._slower = torch.zeros((), device=device), torch.zeros((), device=device)
        matrices = [weight for weight in weights if is_matrix(weight) and weight is not embedding]
        others = [weight for weight in weights if not is_matrix(weight) or weight is embedding]
        self._muon = Muon(matrices, self._rate)
        options = {"fused": True, "capturable": True} if device.type == "cuda" else {"foreach": False}
        self._adam = torch.optim.AdamW(others, lr=self._slower, betas=(0.9, 0.98), weight_decay=0.0, **options)
        self._taken = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._figures = torch.zeros(0)

    def __call__(self, ids: torch.Tensor, parts: torch.Tensor, rate: float) -> torch.Tensor:
        """One step at this learning rate. Returns the figures, on the device: good until the next step."""
        self._ids.copy_(ids, non_blocking=True)
        self._parts.copy_(parts, non_blocking=True)
        self._rate.fill_(rate)
        self._slower.fill_(rate * SLOWER)
        if self._ids.is_cuda and self._taken == WARM_STEPS:
            self._forget_gradients()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            # The loader pins memory in a thread of its own, which may go on meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._figures = self._step()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._forget_gradients()
            self._figures = self._step()
        self._taken += 1
        return self._figures

    def _step(self) -> torch.Tensor:
        with half_precision(self._ids.device):
            loss, figures = self._loss(self._ids, self._parts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._muon.step()
        self._adam.step()
        return figures

    def _forget_gradients(self) -> None:
        for weight in self._weights:
            weight.grad = None
