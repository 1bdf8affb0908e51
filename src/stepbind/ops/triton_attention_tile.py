"""What decode and prefill attention on the GPU share: one tile of a context, and how large tiles are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepbind.caches import KVPages


def tile_tokens(head_dim: int) -> int:
    """Context tokens that a program looks at together."""
    return 32 if head_dim > 128 else 64


def compute_dtype(query: torch.Tensor, pages: KVPages) -> tl.dtype:
    """What matrix products take in; they always sum in float32."""
    if query.dtype == pages.key.dtype == torch.bfloat16:
        return tl.bfloat16
    if query.dtype == pages.key.dtype == torch.float16:
        return tl.float16
    return tl.float32


@triton.jit
def attend_tile(
    acc,
    peak,
    weight,
    q,
    allowed,
    key_at,
    value_at,
    readable,
    key,
    value,
    dim,
    key_dim,
    value_dim,
    scale,
    HEAD_DIM,
    COMPUTE,
):
    """Add the positions at key_at, value_at [TILE] to the running result of q [M, DIMS].

    acc [M, DIMS] and weight [M] are sums of values and of ones, each times 2 ** (score - peak [M]).
    """
    k_mask = (dim[:, None] < HEAD_DIM) & readable[None, :]
    k = tl.load(key + key_at[None, :] + dim[:, None] * key_dim, mask=k_mask, other=0).to(COMPUTE)
    score = tl.dot(q, k, input_precision="ieee") * scale
    score = tl.where(allowed, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, axis=1))
    reference = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf minus -inf is NaN
    share = tl.exp2(score - reference[:, None])
    shrink = tl.exp2(peak - reference)
    v_mask = readable[:, None] & (dim[None, :] < HEAD_DIM)
    v = tl.load(value + value_at[:, None] + dim[None, :] * value_dim, mask=v_mask, other=0).to(COMPUTE)
    acc = tl.dot(share.to(COMPUTE), v, acc * shrink[:, None], input_precision="ieee")
    return acc, higher, weight * shrink + tl.sum(share, axis=1)
