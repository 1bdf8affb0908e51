"""The decay of a gated delta rule before it is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import softplus


@dataclass(frozen=True, eq=False)
class Decay:
    """Decay in log space, -exp(A_log) * softplus(a + dt_bias), not computed yet: the GPU's kernels do it on the way.

    a: [T, value heads]. A_log, dt_bias: [value heads]. The arithmetic is float32: exp(A_log) can overflow float16.
    """

    a: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def computed(self) -> torch.Tensor:
        """[T, value heads] float32."""
        return -self.A_log.float().exp() * softplus(self.a.float() + self.dt_bias)
