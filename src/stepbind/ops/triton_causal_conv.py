"""Depthwise causal convolution with read and write slots, on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepbind.plan.plan import Shared, StatePlan

CHANNELS = 256
"""Channels of one program."""
TOKENS = 16
"""Tokens of one program of prefill."""


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv: torch.Tensor,
    plan: StatePlan,
    shared: Shared,
    silu: bool,
) -> torch.Tensor:
    """Arguments and result of `causal_conv.causal_conv`. One launch in decode, else two: outputs and a copy of the
    states that rows start from, then the states that they leave."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (num_tokens, channels), width = x.shape, weight.shape[1]
    if num_tokens == 0:
        return out
    rows = shared.query_len.shape[0]
    channel_blocks = -(-channels // CHANNELS)
    sequence = (shared.query_start, shared.query_len)
    strides = (*x.stride(), *weight.stride(), *conv.stride())
    sized = (channels, width, triton.next_power_of_2(width), CHANNELS)
    bias_or_weight = weight if bias is None else bias
    if shared.conv_chunk_row.shape[0] == 0:  # one token a row, or none
        _convolve_decode[(max(rows, num_tokens), channel_blocks)](
            out,
            x,
            weight,
            bias_or_weight,
            conv,
            *sequence,
            plan.state_read,
            plan.state_write,
            rows,
            num_tokens,
            conv.shape[0],
            *strides,
            *sized,
            bias is not None,
            silu,
        )
        return out
    before = x.new_empty((rows, width - 1, channels))
    _convolve_tokens[(-(-num_tokens // TOKENS) + rows, channel_blocks)](
        out,
        before,
        x,
        weight,
        bias_or_weight,
        conv,
        shared.row_of_token,
        shared.query_start,
        plan.state_read,
        num_tokens,
        conv.shape[0],
        *strides,
        *sized,
        TOKENS,
        bias is not None,
        silu,
    )
    kept = plan.snapshots
    num_snapshots = kept.row.shape[0]
    _leave_states[(num_snapshots + rows, channel_blocks)](
        conv,
        before,
        x,
        *sequence,
        kept.row,
        kept.offset,
        kept.slot,
        plan.state_write,
        num_snapshots,
        conv.shape[0],
        *strides,
        *sized,
    )
    return out


@triton.jit
def _activate(total, SILU: tl.constexpr):
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit(do_not_specialize=["rows", "num_tokens", "num_slots"])
def _convolve_decode(
    out,
    x,
    weight,
    bias,
    conv,
    query_start,
    query_len,
    state_read,
    state_write,
    rows,
    num_tokens,
    num_slots,
    x_token,
    x_channel,
    weight_channel,
    weight_tap,
    conv_slot,
    conv_step,
    conv_channel,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Program (i, c): the token of row i, if it has one, and token i, if it is padding; a block of channels."""
    index = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < NUM_CHANNELS
    if (index >= tl.load(query_start + rows)) & (index < num_tokens):
        at = index.to(tl.int64) * NUM_CHANNELS + channel
        tl.store(out + at, tl.zeros([CHANNELS], out.dtype.element_ty), mask=inside)
    token = tl.load(query_start + index, mask=index < rows, other=0).to(tl.int64)
    count = tl.load(query_len + index, mask=index < rows, other=0)
    if (count > 0) & (token < num_tokens):
        new = tl.load(x + token * x_token + channel * x_channel, mask=inside, other=0)
        # The taps before the last one see the state, [STEPS, CHANNELS] with WIDTH - 1 steps in use.
        step = tl.arange(0, STEPS)[:, None]
        in_state = (step < WIDTH - 1) & inside[None, :]
        read, write = tl.load(state_read + index), tl.load(state_write + index)
        state_at = step * conv_step + channel[None, :] * conv_channel
        known = (step < tl.where((read >= 0) & (read < num_slots), WIDTH - 1, 0)) & inside[None, :]
        state = tl.load(conv + read.to(tl.int64) * conv_slot + state_at, mask=known, other=0).to(new.dtype)
        taps = tl.load(weight + channel[None, :] * weight_channel + step * weight_tap, mask=in_state, other=0)
        tap = tl.load(weight + channel * weight_channel + (WIDTH - 1) * weight_tap, mask=inside, other=0)
        total = tl.sum(state.to(tl.float32) * taps.to(tl.float32), axis=0) + new.to(tl.float32) * tap.to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=inside, other=0).to(tl.float32)
        total = _activate(total, SILU)
        tl.store(out + token * NUM_CHANNELS + channel, total.to(out.dtype.element_ty), mask=inside)
        # The state moves on by one step: the oldest goes, the new token comes last.
        tl.debug_barrier()  # other threads' reads of these elements come before this thread's writes
        if (write >= 0) & (write < num_slots) & (WIDTH > 1):
            target = conv + write.to(tl.int64) * conv_slot
            tl.store(target + state_at - conv_step, state.to(conv.dtype.element_ty), mask=in_state & (step > 0))
            last = target + (WIDTH - 2) * conv_step + channel * conv_channel
            tl.store(last, new.to(conv.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def _convolve_tokens(
    out,
    before,
    x,
    weight,
    bias,
    conv,
    row_of_token,
    query_start,
    state_read,
    num_tokens,
    num_slots,
    x_token,
    x_channel,
    weight_channel,
    weight_tap,
    conv_slot,
    conv_step,
    conv_channel,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Program (i, c): first TOKENS tokens each, then one row each, whose state goes to `before` [rows, WIDTH - 1,
    channels], zeros where it has none; a block of channels."""
    index = tl.program_id(0)
    token_blocks = tl.cdiv(num_tokens, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < NUM_CHANNELS
    if index < token_blocks:
        token = index * TOKENS + tl.arange(0, TOKENS)
        row = tl.load(row_of_token + token, mask=token < num_tokens, other=-1)
        start = tl.load(query_start + row, mask=row >= 0, other=0)
        read = tl.load(state_read + row, mask=row >= 0, other=-1)
        known = (read >= 0) & (read < num_slots)
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for tap in tl.static_range(WIDTH):
            source = token - (WIDTH - 1) + tap
            is_new = (row >= 0) & (source >= start)
            at = source.to(tl.int64)[:, None] * x_token + channel[None, :] * x_channel
            value = tl.load(x + at, mask=is_new[:, None] & inside[None, :], other=0)
            # Before the row's first token stand the WIDTH - 1 inputs of its state, the last one nearest.
            step = source - start + (WIDTH - 1)
            is_old = known & (row >= 0) & (source < start)
            at = read.to(tl.int64)[:, None] * conv_slot + step[:, None] * conv_step + channel[None, :] * conv_channel
            old = tl.load(conv + at, mask=is_old[:, None] & inside[None, :], other=0).to(value.dtype)
            tap_weight = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=inside, other=0)
            total += tl.where(is_new[:, None], value, old).to(tl.float32) * tap_weight.to(tl.float32)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=inside, other=0).to(tl.float32)[None, :]
        total = tl.where((row >= 0)[:, None], _activate(total, SILU), 0.0)
        at = token.to(tl.int64)[:, None] * NUM_CHANNELS + channel[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=(token < num_tokens)[:, None] & inside[None, :])
    else:
        _copy_state(
            before,
            conv,
            state_read,
            index - token_blocks,
            channel,
            num_slots,
            conv_slot,
            conv_step,
            conv_channel,
            NUM_CHANNELS,
            WIDTH,
            STEPS,
        )


@triton.jit
def _copy_state(
    before,
    conv,
    state_read,
    row,
    channel,
    num_slots,
    conv_slot,
    conv_step,
    conv_channel,
    NUM_CHANNELS,
    WIDTH,
    STEPS: tl.constexpr,
):
    step = tl.arange(0, STEPS)[:, None]
    inside = (channel < NUM_CHANNELS)[None, :]
    read = tl.load(state_read + row)
    known = (step < tl.where((read >= 0) & (read < num_slots), WIDTH - 1, 0)) & inside
    at = read.to(tl.int64) * conv_slot + step * conv_step + channel[None, :] * conv_channel
    state = tl.load(conv + at, mask=known, other=0)
    at = (row.to(tl.int64) * (WIDTH - 1) + step) * NUM_CHANNELS + channel[None, :]
    tl.store(before + at, state.to(before.dtype.element_ty), mask=(step < WIDTH - 1) & inside)


@triton.jit(do_not_specialize=["num_snapshots", "num_slots"])
def _leave_states(
    conv,
    before,
    x,
    query_start,
    query_len,
    snapshot_row,
    snapshot_offset,
    snapshot_slot,
    state_write,
    num_snapshots,
    num_slots,
    x_token,
    x_channel,
    weight_channel,
    weight_tap,
    conv_slot,
    conv_step,
    conv_channel,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (i, c): first one snapshot each, then one row each; a block of channels. The state after some tokens is
    the WIDTH - 1 inputs before the next one."""
    index = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_snapshot = index < num_snapshots
    row = tl.load(snapshot_row + index, mask=is_snapshot, other=-1)
    row = tl.where(is_snapshot, row, index - num_snapshots)
    write = tl.load(state_write + row, mask=(row >= 0) & (index >= num_snapshots), other=-1)
    slot = tl.where(is_snapshot, tl.load(snapshot_slot + index, mask=is_snapshot, other=-1), write)
    if (row >= 0) & (slot >= 0) & (slot < num_slots):
        covered = tl.load(snapshot_offset + index, mask=is_snapshot, other=0)
        covered = tl.where(is_snapshot, covered, tl.load(query_len + row))
        start = tl.load(query_start + row)
        step = tl.arange(0, STEPS)[:, None]
        in_state = (step < WIDTH - 1) & (channel < NUM_CHANNELS)[None, :]
        source = covered - (WIDTH - 1) + step  # offset within the row's new tokens
        at = (start + source).to(tl.int64) * x_token + channel[None, :] * x_channel
        new = tl.load(x + at, mask=in_state & (source >= 0), other=0)
        at = (row.to(tl.int64) * (WIDTH - 1) + source + (WIDTH - 1)) * NUM_CHANNELS + channel[None, :]
        old = tl.load(before + at, mask=in_state & (source < 0), other=0)
        value = tl.where(source >= 0, new, old).to(conv.dtype.element_ty)
        at = slot.to(tl.int64) * conv_slot + step * conv_step + channel[None, :] * conv_channel
        tl.store(conv + at, value, mask=in_state)
