"""All that a Gated DeltaNet layer does between its projections, for one token a row, in one launch on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepbind.caches import StateSlots
from stepbind.plan.plan import Shared, Sizes, StatePlan
from stepbind.step import Phase

ENABLED = True
"""False takes the three ops one after the other, to compare."""
LARGEST_STATE = 2**14
"""Elements of a head's state that one program can hold in registers."""


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """A layer's own parameters. The convolution is followed by silu; the norm's result is scaled by silu of a gate."""

    conv: torch.Tensor  # [channels, width]
    conv_bias: torch.Tensor | None  # [channels]
    A_log: torch.Tensor  # [value heads]
    dt_bias: torch.Tensor  # [value heads]
    norm: torch.Tensor  # [value dim]
    norm_eps: float
    beta_scale: float  # the learning rate is beta_scale * sigmoid(b)


def serves(value: torch.Tensor, key_dim: int, sizes: Sizes) -> bool:
    """Whether `delta_decode` takes a step with value [T, value heads, value dim]."""
    if not ENABLED or not value.is_cuda or sizes.phase is not Phase.DECODE:
        return False
    return _power(value.shape[2]) * _power(key_dim) <= LARGEST_STATE


def delta_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: DeltaWeights,
    slots: StateSlots,
    plan: StatePlan,
    shared: Shared,
) -> torch.Tensor:
    """Convolution with silu, gated delta rule and gated norm of query, key [T, key heads, key dim], value, gate
    [T, value heads, value dim], a, b [T, value heads]; all may have strides.

    What `causal_conv` of the three side by side, `gated_delta` with the decay of a and the learning rate of b, and
    norm(out) * weight * silu(gate) give, in float32 from the inputs to the result; both states go from state_read to
    state_write as there. Returns [T, value heads, value dim] in value's dtype, zero for padding tokens.
    """
    from stepbind.ops import triton_delta_decode

    return triton_delta_decode.delta_decode(query, key, value, gate, a, b, weights, slots, plan, shared)


def _power(size: int) -> int:
    """The next power of 2."""
    return 1 << (size - 1).bit_length()
