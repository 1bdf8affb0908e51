"""fla-core's `chunk_gated_delta_rule`, as its documentation describes it, one token at a time on any device."""

from __future__ import annotations

from itertools import pairwise

import torch


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor,
    chunk_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [1, T, H, K], v [1, T, HV, V], g and beta [1, T, HV], initial_state [N, HV, K, V] float32."""
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    assert q.is_contiguous() or q.shape[0] == 1
    bounds = cu_seqlens.tolist()
    chunks = [(i, c) for i in range(len(bounds) - 1) for c in range(-(-(bounds[i + 1] - bounds[i]) // 64))]
    assert [tuple(pair) for pair in chunk_indices.tolist()] == chunks
    assert initial_state.shape[0] == len(bounds) - 1
    heads = v.shape[2] // q.shape[2]
    q, k = (x[0].float().repeat_interleave(heads, dim=1) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    out, final = torch.zeros_like(v), initial_state.clone()
    for row, (start, stop) in enumerate(pairwise(bounds)):
        for t in range(start, stop):
            state = final[row] * g[0, t].float().exp()[:, None, None]
            update = beta[0, t].float()[:, None] * (v[0, t].float() - torch.einsum("hkv,hk->hv", state, k[t]))
            final[row] = state + k[t][:, :, None] * update[:, None, :]
            out[0, t] = torch.einsum("hkv,hk->hv", final[row], q[t]) * q.shape[-1] ** -0.5
    return out, final
