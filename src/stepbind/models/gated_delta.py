"""The forward of a Gated DeltaNet module on the bound context, shared by all families that have one."""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import ACT2FN

from stepbind.context import current
from stepbind.errors import StepError
from stepbind.models.family import DeltaInputs, DeltaLayout
from stepbind.ops import delta_decode
from stepbind.ops.causal_conv import causal_conv
from stepbind.ops.decay import Decay
from stepbind.ops.delta_decode import DeltaWeights
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
    normed = _mix(module, layout, inputs)
    return module.get_submodule(layout.out)(normed.reshape(1, normed.shape[0], -1))  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # reads the plan and writes the host's cache: not for a compiler
def _mix(module: Any, layout: DeltaLayout, inputs: DeltaInputs) -> torch.Tensor:
    """Convolution and delta rule on the layer's slots, and the gated norm: [T, value heads, value dim]."""
    context = current()
    plan, slots = context.state(module.layer_idx)
    shared, sizes = context.plan.shared, context.plan.sizes
    tokens, key_dim = inputs.value.shape[0], inputs.key.shape[2]
    if tokens != sizes.padded_tokens:
        raise StepError(
            f"layer {module.layer_idx} hidden_states",
            f"{tokens} tokens",
            f"the step's {sizes.padded_tokens} padded tokens",
        )
    norm, weight, silu = module.get_submodule(layout.norm), module.conv1d.weight.squeeze(1), module.activation == "silu"
    if silu and delta_decode.serves(inputs.value, key_dim, sizes) and _is_known(norm, layout):
        parameters = DeltaWeights(
            weight,
            module.conv1d.bias,
            module.A_log,
            module.dt_bias,
            norm.weight,
            norm.variance_epsilon,
            inputs.beta_scale,
        )
        parts = (inputs.query, inputs.key, inputs.value, inputs.gate, inputs.a, inputs.b)
        return delta_decode.delta_decode(*parts, parameters, slots, plan, shared)
    mixed = causal_conv(inputs.mixed(), weight, module.conv1d.bias, slots.conv, plan, shared, silu=silu)
    if not silu:
        mixed = ACT2FN[module.activation](mixed)
    query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    out = gated_delta(
        query.unflatten(-1, (-1, module.head_k_dim)),
        key.unflatten(-1, (-1, module.head_k_dim)),
        value.unflatten(-1, (-1, module.head_v_dim)),
        Decay(inputs.a, module.A_log, module.dt_bias),
        inputs.beta(),
        slots.recurrent,
        plan,
        shared,
        sizes,
    )
    normed: torch.Tensor = norm(out.flatten(0, 1), inputs.gate.flatten(0, 1))
    return normed.reshape(out.shape)


def _is_known(norm: Any, layout: DeltaLayout) -> bool:
    return type(norm).__name__ == layout.norm_class and norm.activation == "silu"
