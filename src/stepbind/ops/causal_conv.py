"""Depthwise causal convolution over a step's tokens, with separate read and write slots for its state."""

from __future__ import annotations

import torch

from stepbind.plan.plan import Shared, StatePlan


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv: torch.Tensor,
    plan: StatePlan,
    shared: Shared,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """Convolve x [T, channels] with weight [channels, width] along each row, continuing from its state.

    silu: apply x * sigmoid(x) to the result, before it is rounded to x's dtype.

    conv: [slots, width-1, channels], the last width-1 inputs of a sequence, oldest first. Row r starts from slot
    state_read[r] (from zeros where that is -1) and leaves its state in state_write[r] and in its snapshots' slots;
    -1 is not written. All reads come before all writes, so a slot may be one row's source and another's target.
    Sums are float32. Returns [T, channels] in x's dtype, zero for padding tokens.
    """
    if x.is_cuda:
        from stepbind.ops import triton_causal_conv

        return triton_causal_conv.causal_conv(x, weight, bias, conv, plan, shared, silu)
    history = weight.shape[1] - 1
    rows = shared.query_len.shape[0]
    token = torch.nonzero(shared.row_of_token >= 0).squeeze(1)
    row_of_token = shared.row_of_token[token].long()

    # Each row's inputs with its history in front, row after row: row r starts at query_start[r] + r * history.
    row_start = shared.query_start[:-1].long() + torch.arange(rows, device=x.device) * history
    inputs = x.new_zeros(x.shape[0] + rows * history, x.shape[1])
    inputs[token + (row_of_token + 1) * history] = x[token]
    back = torch.arange(history, device=x.device)
    reading = torch.nonzero(plan.state_read >= 0).squeeze(1)
    inputs[row_start[reading, None] + back] = conv[plan.state_read[reading].long()].to(x.dtype)

    window = token + row_of_token * history
    total = x.new_zeros(token.shape[0], x.shape[1], dtype=torch.float32)
    for tap in range(history + 1):
        total += inputs[window + tap].float() * weight[:, tap].float()
    if bias is not None:
        total += bias.float()
    out = torch.zeros_like(x)
    if silu:
        total = torch.nn.functional.silu(total)
    out[token] = total.to(x.dtype)

    def store(row: torch.Tensor, covered: torch.Tensor, slot: torch.Tensor) -> None:
        """The state after `covered` new tokens is the `history` inputs before the next one."""
        kept = torch.nonzero(slot >= 0).squeeze(1)
        start = row_start[row[kept]] + covered[kept]
        conv[slot[kept].long()] = inputs[start[:, None] + back].to(conv.dtype)

    snapshots = plan.snapshots
    store(snapshots.row.long(), snapshots.offset, snapshots.slot)
    store(torch.arange(rows, device=x.device), shared.query_len, plan.state_write)
    return out
