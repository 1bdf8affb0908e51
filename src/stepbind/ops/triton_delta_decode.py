"""A Gated DeltaNet layer's token step between its projections, on the GPU.

One program has a key head with its value heads, and so the channels of the convolution that belong to them: nothing is
exchanged between programs. A value head's whole state is in registers, as its norm needs all of its values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepbind.caches import StateSlots
from stepbind.ops import triton_pdl
from stepbind.ops.delta_decode import DeltaWeights
from stepbind.ops.triton_pdl import wait_for_inputs
from stepbind.plan.plan import Shared, StatePlan

STATE_PER_WARP = 2048
"""Elements of a head's state that one warp holds: 64 a thread."""
REGISTERS = 128
"""Registers of a thread on Hopper: two programs of 8 warps then fit a multiprocessor; without it, one of float32."""


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
    """Arguments and result of `delta_decode.delta_decode`, in one launch."""
    num_tokens, value_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[1:]
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if num_tokens == 0:
        return out
    rows, width = shared.query_len.shape[0], weights.conv.shape[1]
    values, keys = triton.next_power_of_2(value_dim), triton.next_power_of_2(key_dim)
    early = triton_pdl.launches_early(value.device)
    _delta_decode[(max(rows, num_tokens), key_heads)](
        out,
        query,
        key,
        value,
        gate,
        a,
        b,
        weights.conv,
        weights.conv if weights.conv_bias is None else weights.conv_bias,
        weights.A_log,
        weights.dt_bias,
        weights.norm,
        slots.recurrent,
        slots.conv,
        shared.query_start,
        shared.query_len,
        plan.state_read,
        plan.state_write,
        rows,
        num_tokens,
        min(slots.recurrent.shape[0], slots.conv.shape[0]),
        key_dim**-0.5,
        weights.beta_scale,
        weights.norm_eps,
        *query.stride(),
        *key.stride(),
        *value.stride(),
        *gate.stride(),
        *a.stride(),
        *b.stride(),
        *weights.conv.stride(),
        *slots.recurrent.stride(),
        *slots.conv.stride(),
        key_heads,
        value_heads // key_heads,
        value_dim,
        key_dim,
        values,
        keys,
        width,
        triton.next_power_of_2(width),
        weights.conv_bias is not None,
        early,
        num_warps=max(1, min(8, values * keys // STATE_PER_WARP)),
        **(triton_pdl.launch_options(early) | ({"maxnreg": REGISTERS} if early else {})),
    )
    return out


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def _convolve(
    x_at,
    weight,
    bias,
    conv,
    channel,
    inside,
    readable_steps,
    weight_channel,
    weight_tap,
    conv_step,
    conv_channel,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Result of the convolution for some channels in float32, their state [STEPS, channels] and their new input.
    conv points to the row's slot, of which readable_steps may be read: WIDTH - 1 or none."""
    step = tl.arange(0, STEPS)[:, None]
    new = tl.load(x_at, mask=inside, other=0)
    known = (step < readable_steps) & inside[None, :]
    state = tl.load(conv + step * conv_step + channel[None, :] * conv_channel, mask=known, other=0).to(new.dtype)
    in_state = (step < WIDTH - 1) & inside[None, :]
    taps = tl.load(weight + channel[None, :] * weight_channel + step * weight_tap, mask=in_state, other=0)
    tap = tl.load(weight + channel * weight_channel + (WIDTH - 1) * weight_tap, mask=inside, other=0)
    total = tl.sum(state.to(tl.float32) * taps.to(tl.float32), axis=0) + new.to(tl.float32) * tap.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0).to(tl.float32)
    return _silu(total), state, new


@triton.jit
def _move_on(conv, state, new, channel, inside, conv_step, conv_channel, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """Store a convolution's state one step later: the oldest input goes, the new one comes last."""
    step = tl.arange(0, STEPS)[:, None]
    at = (step - 1) * conv_step + channel[None, :] * conv_channel
    kept = (step > 0) & (step < WIDTH - 1) & inside[None, :]
    tl.store(conv + at, state.to(conv.dtype.element_ty), mask=kept)
    if WIDTH > 1:
        last = conv + (WIDTH - 2) * conv_step + channel * conv_channel
        tl.store(last, new.to(conv.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "num_tokens", "num_slots"])
def _delta_decode(
    out,
    query,
    key,
    value,
    gate,
    a,
    b,
    conv_weight,
    conv_bias,
    a_log,
    dt_bias,
    norm_weight,
    recurrent,
    conv,
    query_start,
    query_len,
    state_read,
    state_write,
    rows,
    num_tokens,
    num_slots,
    scale,
    beta_scale,
    eps,
    query_token,
    query_head,
    query_dim,
    key_token,
    key_head_stride,
    key_dim,
    value_token,
    value_head,
    value_dim,
    gate_token,
    gate_head,
    gate_dim,
    a_token,
    a_head,
    b_token,
    b_head,
    weight_channel,
    weight_tap,
    state_slot,
    state_head,
    state_row,
    state_column,
    conv_slot,
    conv_step,
    conv_channel,
    KEY_HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, h): the token of row i, if it has one, and token i, if it is padding; key head h."""
    wait_for_inputs(PDL)
    index, key_head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, VALUES), tl.arange(0, KEYS)
    in_row, in_column = row < VALUE_DIM, column < KEY_DIM
    if (index >= tl.load(query_start + rows)) & (index < num_tokens):
        for j in tl.static_range(HEADS_PER_KEY):
            head = index.to(tl.int64) * KEY_HEADS * HEADS_PER_KEY + key_head * HEADS_PER_KEY + j
            tl.store(out + head * VALUE_DIM + row, tl.zeros([VALUES], out.dtype.element_ty), mask=in_row)
    token = tl.load(query_start + index, mask=index < rows, other=0).to(tl.int64)
    count = tl.load(query_len + index, mask=index < rows, other=0)
    # Before the branch, so that these loads wait for none of the others.
    read = tl.load(state_read + index, mask=index < rows, other=-1).to(tl.int64)
    write = tl.load(state_write + index, mask=index < rows, other=-1).to(tl.int64)
    if (count > 0) & (token < num_tokens):
        readable = (read >= 0) & (read < num_slots)
        writable = (write >= 0) & (write < num_slots)
        readable_steps = tl.where(readable, WIDTH - 1, 0)
        readable_rows = tl.where(readable, VALUE_DIM, 0)
        conv_read, conv_write = conv + read * conv_slot, conv + write * conv_slot
        inside = in_row[:, None] & in_column[None, :]
        in_state = inside & (row < readable_rows)[:, None]
        state_at = row[:, None] * state_row + column[None, :] * state_column
        q_channel = key_head * KEY_DIM + column
        k_channel = q_channel + KEY_HEADS * KEY_DIM
        q, q_state, q_new = _convolve(
            query + token * query_token + key_head * query_head + column * query_dim,
            conv_weight,
            conv_bias,
            conv_read,
            q_channel,
            in_column,
            readable_steps,
            weight_channel,
            weight_tap,
            conv_step,
            conv_channel,
            WIDTH,
            STEPS,
            HAS_BIAS,
        )
        k, k_state, k_new = _convolve(
            key + token * key_token + key_head * key_head_stride + column * key_dim,
            conv_weight,
            conv_bias,
            conv_read,
            k_channel,
            in_column,
            readable_steps,
            weight_channel,
            weight_tap,
            conv_step,
            conv_channel,
            WIDTH,
            STEPS,
            HAS_BIAS,
        )
        for j in tl.static_range(HEADS_PER_KEY):
            head = key_head * HEADS_PER_KEY + j
            source = recurrent + read * state_slot + head * state_head
            state = tl.load(source + state_at, mask=in_state, other=0).to(tl.float32)
            v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + row
            v, v_state, v_new = _convolve(
                value + token * value_token + head * value_head + row * value_dim,
                conv_weight,
                conv_bias,
                conv_read,
                v_channel,
                in_row,
                readable_steps,
                weight_channel,
                weight_tap,
                conv_step,
                conv_channel,
                WIDTH,
                STEPS,
                HAS_BIAS,
            )
            z = tl.load(gate + token * gate_token + head * gate_head + row * gate_dim, mask=in_row, other=0)
            g = tl.load(a + token * a_token + head * a_head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
            softplus = tl.where(g > 20.0, g, tl.log(1.0 + tl.exp(tl.minimum(g, 20.0))))  # torch's threshold
            decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus)
            rate = beta_scale / (1.0 + tl.exp(-tl.load(b + token * b_token + head * b_head).to(tl.float32)))
            tl.debug_barrier()  # other threads' reads of these channels come before this thread's writes
            if writable:
                if j == 0:
                    _move_on(conv_write, q_state, q_new, q_channel, in_column, conv_step, conv_channel, WIDTH, STEPS)
                    _move_on(conv_write, k_state, k_new, k_channel, in_column, conv_step, conv_channel, WIDTH, STEPS)
                _move_on(conv_write, v_state, v_new, v_channel, in_row, conv_step, conv_channel, WIDTH, STEPS)
            unit_k = _unit(k)
            state *= decay
            update = rate * (v - tl.sum(state * unit_k[None, :], axis=1))
            state += update[:, None] * unit_k[None, :]
            result = tl.sum(state * (_unit(q) * scale)[None, :], axis=1)
            if writable:
                target = recurrent + write * state_slot + head * state_head
                tl.store(target + state_at, state.to(recurrent.dtype.element_ty), mask=inside)
            size = tl.rsqrt(tl.sum(result * result, axis=0) / VALUE_DIM + eps)
            result *= size * tl.load(norm_weight + row, mask=in_row, other=0).to(tl.float32) * _silu(z.to(tl.float32))
            at = (token * KEY_HEADS * HEADS_PER_KEY + head) * VALUE_DIM + row
            tl.store(out + at, result.to(out.dtype.element_ty), mask=in_row)
