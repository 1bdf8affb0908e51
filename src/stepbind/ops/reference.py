"""The ops in plain Python over rows and tokens, to be checked by eye. Tests hold the fast ops to these."""

from __future__ import annotations

import torch

from stepbind.caches import KVPages
from stepbind.plan.plan import PagedPlan, Shared, StatePlan


def paged_attention_reference(
    query: torch.Tensor, pages: KVPages, plan: PagedPlan, shared: Shared, scale: float
) -> torch.Tensor:
    """Arguments and result of `attention.paged_attention`."""
    out = torch.zeros_like(query)
    size, heads_per_kv = pages.key.shape[2], query.shape[1] // pages.key.shape[1]
    for t in range(query.shape[0]):
        row = int(shared.row_of_token[t])
        if row < 0:
            continue
        own_position = int(shared.prior_len[row]) + t - int(shared.query_start[row])
        for head in range(query.shape[1]):
            keys, values = [], []
            for position in range(own_position + 1):
                block = int(plan.block_table[row, position // size])
                if block >= 0:
                    keys.append(pages.key[block, head // heads_per_kv, position % size])
                    values.append(pages.value[block, head // heads_per_kv, position % size])
            if keys:
                scores = torch.stack(keys) @ query[t, head] * scale
                out[t, head] = torch.softmax(scores, dim=0) @ torch.stack(values)
    return out


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv: torch.Tensor,
    plan: StatePlan,
    shared: Shared,
) -> torch.Tensor:
    """Arguments and result of `causal_conv.causal_conv`."""
    out, before = torch.zeros_like(x), conv.clone()
    for row in range(shared.query_len.shape[0]):
        read, write = int(plan.state_read[row]), int(plan.state_write[row])
        state = before[read].clone() if read >= 0 else torch.zeros_like(before[0])
        start, stop = int(shared.query_start[row]), int(shared.query_start[row + 1])
        for t in range(start, stop):
            window = torch.cat([state, x[t : t + 1]])
            out[t] = (window * weight.T).sum(dim=0) + (0 if bias is None else bias)
            state = window[1:]
            for slot in _snapshot_slots(plan, row, t - start + 1):
                conv[slot] = state
        if write >= 0:
            conv[write] = state
    return out


def gated_delta_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    recurrent: torch.Tensor,
    plan: StatePlan,
    shared: Shared,
) -> torch.Tensor:
    """Arguments and result of `gated_delta.gated_delta`, one head and token at a time."""
    out, before = torch.zeros_like(value), recurrent.clone()
    values_per_key = value.shape[1] // key.shape[1]
    for row in range(shared.query_len.shape[0]):
        read, write = int(plan.state_read[row]), int(plan.state_write[row])
        state = before[read].clone() if read >= 0 else torch.zeros_like(before[0])
        start, stop = int(shared.query_start[row]), int(shared.query_start[row + 1])
        for t in range(start, stop):
            for head in range(value.shape[1]):
                q, k = query[t, head // values_per_key], key[t, head // values_per_key]
                q = q / torch.sqrt(q @ q + 1e-6) * q.shape[0] ** -0.5
                k = k / torch.sqrt(k @ k + 1e-6)
                decayed = torch.exp(decay[t, head]) * state[head]
                update = beta[t, head] * (value[t, head] - decayed @ k)
                state[head] = decayed + torch.outer(update, k)
                out[t, head] = state[head] @ q
            for slot in _snapshot_slots(plan, row, t - start + 1):
                recurrent[slot] = state
        if write >= 0:
            recurrent[write] = state
    return out


def gated_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor) -> torch.Tensor:
    """Each head's x [T, heads, D] divided by its root mean square, times weight [D] and silu(gate [T, heads, D])."""
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight * torch.nn.functional.silu(gate)


def _snapshot_slots(plan: StatePlan, row: int, covered: int) -> list[int]:
    snapshots = plan.snapshots
    entries = zip(snapshots.row.tolist(), snapshots.offset.tolist(), snapshots.slot.tolist(), strict=True)
    return [slot for r, offset, slot in entries if r == row and offset == covered and slot >= 0]
