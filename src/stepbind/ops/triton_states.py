"""Copying recurrent states out of and into a host's slots, on the GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

VALUES = 32
"""Rows of a state that one program copies."""


def gather_states(recurrent: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """[N, value heads, key dim, value dim] float32 of recurrent [slots, value heads, value dim, key dim] at slot [N];
    zeros for slot -1."""
    _, heads, value_dim, key_dim = recurrent.shape
    states = torch.empty((slot.shape[0], heads, key_dim, value_dim), dtype=torch.float32, device=recurrent.device)
    _launch(_gather_states, recurrent, slot, states)
    return states


def scatter_states(recurrent: torch.Tensor, slot: torch.Tensor, states: torch.Tensor) -> None:
    """Write states as `gather_states` gives them to slot [N]; -1 is skipped."""
    _launch(_scatter_states, recurrent, slot, states)


def _launch(kernel: Any, recurrent: torch.Tensor, slot: torch.Tensor, states: torch.Tensor) -> None:
    num_slots, heads, value_dim, key_dim = recurrent.shape
    if slot.shape[0] == 0:
        return
    kernel[(slot.shape[0], heads, -(-value_dim // VALUES))](
        recurrent,
        slot,
        states,
        num_slots,
        *recurrent.stride(),
        *states.transpose(2, 3).stride(),
        value_dim,
        key_dim,
        VALUES,
        triton.next_power_of_2(key_dim),
    )


@triton.jit
def _gather_states(
    recurrent,
    slots,
    states,
    num_slots,
    slot_stride,
    slot_head,
    slot_row,
    slot_column,
    state_stride,
    state_head,
    state_row,
    state_column,
    VALUE_DIM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
):
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * VALUES + tl.arange(0, VALUES)[:, None]
    column = tl.arange(0, KEYS)[None, :]
    inside = (row < VALUE_DIM) & (column < KEY_DIM)
    slot = tl.load(slots + index)
    at = slot.to(tl.int64) * slot_stride + head * slot_head + row * slot_row + column * slot_column
    readable = tl.where((slot >= 0) & (slot < num_slots), VALUE_DIM, 0)
    state = tl.load(recurrent + at, mask=inside & (row < readable), other=0)
    at = index * state_stride + head * state_head + row * state_row + column * state_column
    tl.store(states + at, state.to(tl.float32), mask=inside)


@triton.jit
def _scatter_states(
    recurrent,
    slots,
    states,
    num_slots,
    slot_stride,
    slot_head,
    slot_row,
    slot_column,
    state_stride,
    state_head,
    state_row,
    state_column,
    VALUE_DIM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
):
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * VALUES + tl.arange(0, VALUES)[:, None]
    column = tl.arange(0, KEYS)[None, :]
    slot = tl.load(slots + index)
    if (slot >= 0) & (slot < num_slots):
        inside = (row < VALUE_DIM) & (column < KEY_DIM)
        at = index * state_stride + head * state_head + row * state_row + column * state_column
        state = tl.load(states + at, mask=inside, other=0)
        at = slot.to(tl.int64) * slot_stride + head * slot_head + row * slot_row + column * slot_column
        tl.store(recurrent + at, state.to(recurrent.dtype.element_ty), mask=inside)
