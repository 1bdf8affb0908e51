"""The gated delta rule, token by token, in place in the host's states, on the GPU.

One program has VALUES rows of one head's state in registers: they do not depend on each other, so that a row's tokens
need no exchange between programs. It is bound by reading and writing the states, once a step whatever the row's
number of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepbind.ops.decay import Decay
from stepbind.plan.plan import Shared, Sizes, StatePlan
from stepbind.step import Phase

PROGRAMS = 528
"""Programs that are worth splitting a head's state for: four for each of an H200's 132 multiprocessors."""


def recurrent_gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor | Decay,
    beta: torch.Tensor,
    recurrent: torch.Tensor,
    plan: StatePlan,
    shared: Shared,
    sizes: Sizes,
) -> torch.Tensor:
    """Arguments and result of `gated_delta.gated_delta`, in one launch."""
    num_tokens, value_heads, value_dim = value.shape
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if num_tokens == 0:
        return out
    rows, key_dim = shared.query_len.shape[0], key.shape[2]
    values = value_rows(rows * value_heads, value_dim)
    raw = decay if isinstance(decay, Decay) else Decay(decay, decay, decay)
    _recurrent_gated_delta[(max(rows, num_tokens), value_heads, -(-value_dim // values))](
        out,
        query,
        key,
        value,
        raw.a,
        raw.A_log,
        raw.dt_bias,
        beta,
        recurrent,
        shared.query_start,
        shared.query_len,
        shared.prior_len,
        plan.state_read,
        plan.state_write,
        plan.snapshots.slot,
        rows,
        num_tokens,
        recurrent.shape[0],
        plan.group.block_size,
        key_dim**-0.5,
        *query.stride(),
        *key.stride(),
        *value.stride(),
        *raw.a.stride(),
        *beta.stride(),
        *recurrent.stride(),
        value_heads // key.shape[1],
        value_heads,
        value_dim,
        key_dim,
        values,
        triton.next_power_of_2(key_dim),
        isinstance(decay, Decay),
        sizes.phase is Phase.DECODE,
        sizes.phase is Phase.VERIFY,
        num_warps=max(1, min(4, values // 8)),
    )
    return out


def value_rows(heads: int, value_dim: int) -> int:
    """Rows of a head's state [value dim, key dim] that one program has, for `heads` heads in all rows of a step."""
    rows = min(32, triton.next_power_of_2(value_dim))
    while rows > 8 and heads * -(-value_dim // rows) < PROGRAMS:
        rows //= 2
    return int(rows)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def _token_step(
    state,
    out,
    query,
    key,
    value,
    a,
    a_log,
    dt_bias,
    beta,
    token,
    head,
    key_head,
    row,
    column,
    scale,
    query_token,
    query_head,
    query_dim,
    key_token,
    key_head_stride,
    key_dim,
    value_token,
    value_head,
    value_dim,
    a_token,
    a_head,
    beta_token,
    beta_head,
    VALUE_HEADS,
    VALUE_DIM,
    KEY_DIM,
    IS_RAW,
):
    """One token of one head: its output, from and to a part of the state [VALUES, KEYS]."""
    token = token.to(tl.int64)
    q = tl.load(query + token * query_token + key_head * query_head + column * query_dim, column < KEY_DIM, other=0)
    k = tl.load(key + token * key_token + key_head * key_head_stride + column * key_dim, column < KEY_DIM, other=0)
    v = tl.load(value + token * value_token + head * value_head + row * value_dim, row < VALUE_DIM, other=0)
    g = tl.load(a + token * a_token + head * a_head).to(tl.float32)
    if IS_RAW:
        g += tl.load(dt_bias + head).to(tl.float32)
        softplus = tl.where(g > 20.0, g, tl.log(1.0 + tl.exp(tl.minimum(g, 20.0))))  # torch's threshold
        g = -tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus
    b = tl.load(beta + token * beta_token + head * beta_head).to(tl.float32)
    q = _unit(q.to(tl.float32)) * scale
    k = _unit(k.to(tl.float32))
    state *= tl.exp(g)
    update = b * (v.to(tl.float32) - tl.sum(state * k[None, :], axis=1))
    state += update[:, None] * k[None, :]
    result = tl.sum(state * q[None, :], axis=1)
    at = (token * VALUE_HEADS + head) * VALUE_DIM + row
    tl.store(out + at, result.to(out.dtype.element_ty), mask=row < VALUE_DIM)
    return state


@triton.jit
def _snapshots_before(query_len, prior_len, last, block_size, IS_VERIFY: tl.constexpr, SEARCH: tl.constexpr):
    """Snapshots of the rows before `last`: of all drafted tokens but a row's last, or at block boundaries."""
    total = 0
    for first in range(0, last, SEARCH):
        row = first + tl.arange(0, SEARCH)
        query = tl.load(query_len + row, mask=row < last, other=0)
        if IS_VERIFY:
            count = query - 1
        else:
            prior = tl.load(prior_len + row, mask=row < last, other=0)
            count = (prior + query - 1) // block_size - prior // block_size
        total += tl.sum(tl.where(query > 0, count, 0), axis=0)
    return total


@triton.jit(do_not_specialize=["rows", "num_tokens", "num_slots", "block_size"])
def _recurrent_gated_delta(
    out,
    query,
    key,
    value,
    a,
    a_log,
    dt_bias,
    beta,
    recurrent,
    query_start,
    query_len,
    prior_len,
    state_read,
    state_write,
    snapshot_slot,
    rows,
    num_tokens,
    num_slots,
    block_size,
    scale,
    query_token,
    query_head,
    query_dim,
    key_token,
    key_head_stride,
    key_dim,
    value_token,
    value_head,
    value_dim,
    a_token,
    a_head,
    beta_token,
    beta_head,
    state_slot,
    state_head,
    state_row,
    state_column,
    HEADS_PER_KEY: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    IS_RAW: tl.constexpr,
    IS_DECODE: tl.constexpr,
    IS_VERIFY: tl.constexpr,
):
    """Program (i, h, v): the tokens of row i, and token i where it is padding; value head h, VALUES of its values."""
    index, head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    column = tl.arange(0, KEYS)
    total = tl.load(query_start + rows)
    if (index >= total) & (index < num_tokens):
        at = (index.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + row
        tl.store(out + at, tl.zeros([VALUES], out.dtype.element_ty), mask=row < VALUE_DIM)
    count = tl.load(query_len + index, mask=index < rows, other=0)
    start = tl.load(query_start + index, mask=index < rows, other=0)
    if (count > 0) & (start + count <= num_tokens):
        inside = (row < VALUE_DIM)[:, None] & (column < KEY_DIM)[None, :]
        at = head * state_head + row[:, None] * state_row + column[None, :] * state_column
        read, write = tl.load(state_read + index), tl.load(state_write + index)
        readable = tl.where((read >= 0) & (read < num_slots), VALUE_DIM, 0)
        source = recurrent + read.to(tl.int64) * state_slot
        state = tl.load(source + at, mask=inside & (row < readable)[:, None], other=0).to(tl.float32)
        snapshot = 0
        if not IS_DECODE:
            snapshot = _snapshots_before(query_len, prior_len, index, block_size, IS_VERIFY, 32)
        prior = tl.load(prior_len + index)
        for offset in range(0, count):
            state = _token_step(
                state,
                out,
                query,
                key,
                value,
                a,
                a_log,
                dt_bias,
                beta,
                start + offset,
                head,
                head // HEADS_PER_KEY,
                row,
                column,
                scale,
                query_token,
                query_head,
                query_dim,
                key_token,
                key_head_stride,
                key_dim,
                value_token,
                value_head,
                value_dim,
                a_token,
                a_head,
                beta_token,
                beta_head,
                VALUE_HEADS,
                VALUE_DIM,
                KEY_DIM,
                IS_RAW,
            )
            if not IS_DECODE:
                if IS_VERIFY:
                    keep = offset + 1 < count
                else:
                    keep = (offset + 1 < count) & ((prior + offset + 1) % block_size == 0)
                if keep:
                    slot = tl.load(snapshot_slot + snapshot)
                    snapshot += 1
                    if (slot >= 0) & (slot < num_slots):
                        target = recurrent + slot.to(tl.int64) * state_slot
                        tl.store(target + at, state.to(recurrent.dtype.element_ty), mask=inside)
        if (write >= 0) & (write < num_slots):
            target = recurrent + write.to(tl.int64) * state_slot
            tl.store(target + at, state.to(recurrent.dtype.element_ty), mask=inside)
