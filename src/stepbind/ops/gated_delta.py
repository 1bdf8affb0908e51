"""The gated delta rule over a step's tokens, with separate read and write slots for the recurrent state.

With decay g, learning rate beta, and unit keys, token t changes a head's state S [value dim, key dim] as

    S_t = exp(g_t) S_{t-1} + u_t k_t^T,    u_t = beta_t (v_t - exp(g_t) S_{t-1} k_t),    o_t = S_t q_t

(Yang et al., "Gated Delta Networks", arXiv 2412.06464). `reference.py` says it in these words; here decode is one
such step for all rows, and prefill solves for all u of a chunk at once.
"""

from __future__ import annotations

import torch

from stepbind.ops.decay import Decay
from stepbind.ops.ragged import RowLayout
from stepbind.plan.plan import Shared, Sizes, StatePlan
from stepbind.step import Phase

CHUNK = 64
"""Tokens whose updates are solved for together."""


def gated_delta(
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
    """Gated delta rule over query, key [T, key heads, key dim], value [T, value heads, value dim], decay (in log
    space, or what it is computed from) and beta [T, value heads].

    recurrent: [slots, value heads, value dim, key dim]. Row r starts from slot state_read[r] (from zeros where that
    is -1) and leaves its state in state_write[r] and in its snapshots' slots; -1 is not written. All reads come
    before all writes. Queries and keys are normalised, queries scaled by key dim ** -0.5; key heads are shared by
    consecutive value heads. The arithmetic is float32. Returns [T, value heads, value dim] in value's dtype, zero
    for padding tokens.
    """
    if value.is_cuda:
        return _on_gpu(query, key, value, decay, beta, recurrent, plan, shared, sizes)
    if isinstance(decay, Decay):
        decay = decay.computed()
    shared_heads = value.shape[1] // key.shape[1]
    query = _unit(query.float()).repeat_interleave(shared_heads, dim=1) * query.shape[-1] ** -0.5
    key = _unit(key.float()).repeat_interleave(shared_heads, dim=1)
    inputs = (query, key, value.float(), decay.float(), beta.float())
    run = _decode if sizes.phase is Phase.DECODE else _prefill
    return run(*inputs, recurrent, plan, shared, sizes).to(value.dtype)


def _on_gpu(
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
    """Long prefills in chunks by fla-core where it is installed and knows the dtype, all else token by token."""
    from stepbind.ops import fla_gated_delta, triton_gated_delta

    run = triton_gated_delta.recurrent_gated_delta
    if fla_gated_delta.serves(value, sizes):
        run = fla_gated_delta.chunked_gated_delta
    return run(query, key, value, decay, beta, recurrent, plan, shared, sizes)


def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    recurrent: torch.Tensor,
    plan: StatePlan,
    shared: Shared,
    sizes: Sizes,
) -> torch.Tensor:
    """One token a row: the rule itself, for all rows at once."""
    row = torch.nonzero(shared.query_len > 0).squeeze(1)
    token = shared.query_start[row].long()
    state = _read_states(recurrent, plan.state_read[row])
    state *= decay[token].exp()[..., None, None]
    k = key[token][..., None]
    update = beta[token][..., None] * (value[token] - (state @ k).squeeze(-1))
    state += update[..., None] * k.transpose(-1, -2)
    out = torch.zeros_like(value)
    out[token] = (state @ query[token][..., None]).squeeze(-1)
    _write_states(recurrent, plan.state_write[row], state)
    return out


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    recurrent: torch.Tensor,
    plan: StatePlan,
    shared: Shared,
    sizes: Sizes,
) -> torch.Tensor:
    """Rows padded to one length with tokens that change nothing (k = v = 0, decay 1), chunk after chunk.

    Within a chunk that starts from S, with D_i the summed decay up to token i, the states are
        S_i = exp(D_i) S + sum_{j<=i} exp(D_i - D_j) u_j k_j^T
    so that the u solve a unit lower triangular system, whose right-hand side is linear in S:
        u_i + beta_i sum_{j<i} exp(D_i - D_j) (k_i k_j) u_j = beta_i v_i - beta_i exp(D_i) S k_i.
    """
    tokens = value.shape[0]
    state = _read_states(recurrent, plan.state_read)
    if sizes.max_query == 0:
        return torch.zeros_like(value)
    layout = RowLayout.of(shared, sizes.max_query)
    chunk = min(CHUNK, sizes.max_query)
    chunks = -(-sizes.max_query // chunk)

    def by_chunk(flat: torch.Tensor) -> torch.Tensor:
        """[T, heads, ...] -> [B, heads, chunks, chunk, ...]"""
        padded = layout.pad(flat).transpose(1, 2)
        missing = chunks * chunk - sizes.max_query
        padded = torch.cat([padded, padded.new_zeros(*padded.shape[:2], missing, *padded.shape[3:])], dim=2)
        return padded.reshape(*padded.shape[:2], chunks, chunk, *padded.shape[3:])

    q, k, v, b = by_chunk(query), by_chunk(key), by_chunk(value), by_chunk(beta)[..., None]
    total = by_chunk(decay).cumsum(dim=3)
    between = (total[..., :, None] - total[..., None, :]).tril()  # log decay from token j to token i >= j
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=value.device).tril()
    between = between.exp().masked_fill(~lower, 0)
    system = b * (k @ k.transpose(-1, -2)) * between
    given = torch.cat([b * v, b * total[..., None].exp() * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    from_values, from_state = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * between

    out = torch.empty_like(v)
    snapshots = plan.snapshots
    kept = torch.nonzero(snapshots.slot >= 0).squeeze(1)
    last = snapshots.offset[kept].long() - 1  # the last token that a snapshot covers
    snapshot_row, snapshot_state = snapshots.row[kept].long(), state.new_zeros(kept.shape[0], *state.shape[1:])
    for c in range(chunks):
        update = from_values[:, :, c] - from_state[:, :, c] @ state.transpose(-1, -2)
        decayed_q = q[:, :, c] * total[:, :, c, :, None].exp()
        out[:, :, c] = decayed_q @ state.transpose(-1, -2) + scores[:, :, c] @ update
        here = torch.nonzero(last // chunk == c).squeeze(1)
        if here.numel():
            row, end = snapshot_row[here], last[here] % chunk
            snapshot_state[here] = _state_at(
                state[row], update[row], k[row, :, c], between[row, :, c, end], total[row, :, c, end]
            )
        state = _state_at(state, update, k[:, :, c], between[:, :, c, -1], total[:, :, c, -1])

    _write_states(recurrent, snapshots.slot[kept], snapshot_state)
    _write_states(recurrent, plan.state_write, state)
    return layout.flatten(out.flatten(2, 3).transpose(1, 2)[:, : sizes.max_query], tokens)


def _state_at(
    state: torch.Tensor, update: torch.Tensor, key: torch.Tensor, weight: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """State after some token i of a chunk: `weight` [B, heads, chunk] is exp(D_i - D_j), 0 for j > i; `total`
    [B, heads] is D_i."""
    return total.exp()[..., None, None] * state + (update * weight[..., None]).transpose(-1, -2) @ key


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def _read_states(recurrent: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """[B, value heads, value dim, key dim] float32; zero for slot -1."""
    state = torch.zeros(slot.shape[0], *recurrent.shape[1:], dtype=torch.float32, device=recurrent.device)
    row = torch.nonzero(slot >= 0).squeeze(1)
    state[row] = recurrent[slot[row].long()].float()
    return state


def _write_states(recurrent: torch.Tensor, slot: torch.Tensor, state: torch.Tensor) -> None:
    row = torch.nonzero(slot >= 0).squeeze(1)
    recurrent[slot[row].long()] = state[row].to(recurrent.dtype)
