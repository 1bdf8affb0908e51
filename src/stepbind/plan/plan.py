"""The values that the kernels of one step read: shared ones once, and per group only what differs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stepbind.groups import CacheGroup
from stepbind.step import Phase, Step

CONV_CHUNK = 8
"""Tokens that one program of a varlen causal convolution handles (reference behaviour 10)."""


def conv_list_size(chunks: int) -> int:
    """Entries of the lists that a varlen convolution's launch is made with: room for more chunks than a step has
    (reference behaviour 10)."""
    return 2 * max(1024, chunks)


@dataclass(frozen=True, eq=False)
class Sizes:
    """What the host knows of a step. Rows and tokens are counts; `max_query`, `max_context`, `total_context` are in
    tokens, new ones included. query_len, prior_len: the host's lengths, [num_rows], theirs to change after the step.
    """

    phase: Phase
    num_rows: int
    num_tokens: int
    padded_rows: int
    padded_tokens: int
    max_query: int
    max_context: int
    is_dummy: bool
    query_len: npt.NDArray[np.int32]
    prior_len: npt.NDArray[np.int32]

    @property
    def total_context(self) -> int:
        return int(self.prior_len.sum(dtype=np.int64)) + self.num_tokens

    @staticmethod
    def of(step: Step) -> Sizes:
        sizes = object.__new__(Sizes)
        # One update, as every step makes one: a frozen dataclass sets its fields one by one.
        vars(sizes).update(
            phase=step.phase,
            num_rows=step.num_rows,
            num_tokens=step.num_tokens,
            padded_rows=step.padded_rows,
            padded_tokens=step.padded_tokens,
            max_query=step.max_query,
            max_context=step.max_context,
            is_dummy=step.is_dummy,
            query_len=step.query_len.host,
            prior_len=step.prior_len.host,
        )
        return sizes


@dataclass(frozen=True, eq=False)
class Shared:
    """Values that every group of a step uses. Bp, Tp: padded rows and tokens; N: convolution chunks.

    Padding rows have length 0 everywhere; padding tokens have row -1, position 0 and an empty span.
    """

    query_start: torch.Tensor  # [Bp+1] int32, offsets of the rows' first tokens; the total repeats for padding
    query_len: torch.Tensor  # [Bp] int32, new tokens
    prior_len: torch.Tensor  # [Bp] int32, tokens in the cache before the step
    context_len: torch.Tensor  # [Bp] int32, prior_len + query_len
    has_prior: torch.Tensor  # [Bp] bool
    row_of_token: torch.Tensor  # [Tp] int32
    position: torch.Tensor  # [Tp] int64, rotary position
    span_start: torch.Tensor  # [Tp] int32, index of the first token of this token's row
    span_end: torch.Tensor  # [Tp] int32, one past the last new token it may attend to: its own index + 1
    conv_chunk_row: torch.Tensor  # [N] int32, row of each CONV_CHUNK-token program (empty in decode); -1 = none
    conv_chunk_index: torch.Tensor  # [N] int32, number of that chunk within its row; -1 = none


@dataclass(frozen=True, eq=False)
class Snapshots:
    """Recurrent states to keep on the way through a prefill, one entry for each block boundary (or, in verify,
    each drafted token but the last) strictly inside a row's new tokens."""

    row: torch.Tensor  # [N] int32
    offset: torch.Tensor  # [N] int32, new tokens of the row that the state covers: 1 .. query_len-1
    slot: torch.Tensor  # [N] int32, -1 where the table has no block there


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """What an attention or latent group reads. C: columns that the step's longest context needs, at least.

    slot: [Tp] int64, token slot = block * block size + offset, the same number at both granularities; -1 = none.
    block_table: [Bp, C] int32 kernel block ids, -1 = none. Only the columns that a row's context_len covers say
        anything. On a GPU, C is the arena's width in every step, and what stands in the other columns is an earlier
        step's: always -1 or inside the pool, but somebody else's. Ops stop at context_len.
    physical_table: the same in physical blocks, for latent groups only.
    """

    group: CacheGroup
    slot: torch.Tensor
    block_table: torch.Tensor
    physical_table: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class StatePlan:
    """What a recurrent group reads. Slots are physical block ids, -1 = none.

    With n tokens before the step, q new ones and B tokens a block (engine contract, "Recurrent state"):
    state_read: [Bp] int32, block of token n-1, column (n-1) // B; -1 for n = 0.
    state_write: [Bp] int32, block of token n+q-1, column (n+q-1) // B; in verify column n // B + q-1.
    """

    group: CacheGroup
    state_read: torch.Tensor
    state_write: torch.Tensor
    snapshots: Snapshots


GroupPlan = PagedPlan | StatePlan


@dataclass(frozen=True, eq=False)
class Plan:
    """One step, ready for the layers: host scalars, shared values, and one plan per cache group."""

    sizes: Sizes
    shared: Shared
    groups: tuple[GroupPlan, ...]
    group_of_layer: dict[int, int]  # layer number -> index into groups
    descriptor: torch.Tensor | None = None  # read by the GPU fill
