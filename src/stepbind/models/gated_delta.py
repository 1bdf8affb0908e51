"""The forward of a Gated DeltaNet module on the bound context, shared by all families that have one."""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import ACT2FN

from stepbind.context import current
from stepbind.errors import StepError
from stepbind.models.family import DeltaInputs, DeltaLayout
from stepbind.ops.causal_conv import causal_conv
from stepbind.ops.decay import Decay
from stepbind.ops.gated_delta import gated_delta


def gated_delta_forward(module: Any, layout: DeltaLayout, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """hidden_states [1, T, hidden size] -> the same shape; state comes from and goes to the layer's slots.

    Takes and ignores what transformers' decoder layers pass beside it (cache, mask, positions).
    Raises `NotBoundError` outside of `bind`, `StepError` for a batch of more than one.
    """
    if hidden_states.shape[0] != 1:
        name = f"layer {module.layer_idx} hidden_states"
        raise StepError(name, f"shape {tuple(hidden_states.shape)}", "[1, tokens, hidden size]")
    inputs = layout.project(module, hidden_states[0])
    out = _mix(module, inputs)
    norm, project_out = module.get_submodule(layout.norm), module.get_submodule(layout.out)
    normed: torch.Tensor = norm(out.flatten(0, 1), inputs.gate.flatten(0, 1))
    return project_out(normed.reshape(1, out.shape[0], -1))  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # reads the plan and writes the host's cache: not for a compiler
def _mix(module: Any, inputs: DeltaInputs) -> torch.Tensor:
    """Convolution and delta rule on the layer's slots: [T, value heads, value dim]."""
    context = current()
    plan, slots = context.state(module.layer_idx)
    shared, sizes = context.plan.shared, context.plan.sizes
    if inputs.mixed.shape[0] != sizes.padded_tokens:
        raise StepError(
            f"layer {module.layer_idx} hidden_states",
            f"{inputs.mixed.shape[0]} tokens",
            f"the step's {sizes.padded_tokens} padded tokens",
        )
    weight = module.conv1d.weight.squeeze(1)
    silu = module.activation == "silu"
    mixed = causal_conv(inputs.mixed, weight, module.conv1d.bias, slots.conv, plan, shared, silu=silu)
    if not silu:
        mixed = ACT2FN[module.activation](mixed)
    query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    return gated_delta(
        query.unflatten(-1, (-1, module.head_k_dim)),
        key.unflatten(-1, (-1, module.head_k_dim)),
        value.unflatten(-1, (-1, module.head_v_dim)),
        Decay(inputs.a, module.A_log, module.dt_bias),
        inputs.beta,
        slots.recurrent,
        plan,
        shared,
        sizes,
    )
