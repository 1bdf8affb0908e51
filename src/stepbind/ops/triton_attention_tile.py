"""What decode and prefill attention on the GPU share: one tile of a context, and how large tiles are."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


def tile_tokens(head_dim: int) -> int:
    """Context tokens that a program looks at together."""
    return 32 if head_dim > 128 else 64


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that one program can have. On AMD, and where no GPU is, MI300's 64 KiB."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 64 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def compute_dtype(query: torch.Tensor, pages: torch.Tensor) -> tl.dtype:
    """What matrix products take in; they always sum in float32."""
    if query.dtype == pages.dtype == torch.bfloat16:
        return tl.bfloat16
    if query.dtype == pages.dtype == torch.float16:
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
    share, shrink, peak, weight = soften(score, allowed, peak, weight)
    v_mask = readable[:, None] & (dim[None, :] < HEAD_DIM)
    v = tl.load(value + value_at[:, None] + dim[None, :] * value_dim, mask=v_mask, other=0).to(COMPUTE)
    acc = tl.dot(share.to(COMPUTE), v, acc * shrink[:, None], input_precision="ieee")
    return acc, peak, weight


@triton.jit
def soften(score, allowed, peak, weight):
    """Take a tile of scores [M, TILE], in powers of 2, into a running softmax.

    Returns each score's share [M, TILE] and by how much older sums shrink [M], and peak and weight with the tile in.
    """
    score = tl.where(allowed, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, axis=1))
    reference = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf minus -inf is NaN
    share = tl.exp2(score - reference[:, None])
    shrink = tl.exp2(peak - reference)
    return share, shrink, higher, weight * shrink + tl.sum(share, axis=1)
