"""All that ATOM's metadata is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from stepbind.targets.atom.read import Offsets
from stepbind.targets.atom.shared import SharedValues
from stepbind.targets.atom.values import GroupValues


class States(NamedTuple):
    """State slots [B] int32 by (group number, is prefill): those to read and those to write."""

    read: dict[Any, Any]
    write: dict[Any, Any]


class Computed(NamedTuple):
    """All that ATOM's metadata is made of. B rows, T tokens.

    query_start_host: the host's own offsets, for Gated DeltaNet; own_start: the same as a tensor, where they are not
    `shared.query_start`. seq_lens: [B] int32 context lengths. max_query,
    max_context, total_context: tokens. has_prior: [B] bool, in a prefill with Gated DeltaNet layers; has_prefix:
    whether the host says so of any row. block_table:
    [B, C] int32, slot_mapping: [T] int64, both of the first group as the reference has them. state_read, state_write:
    [B] int32, of the first group too. states: of all groups; None where `groups` has to be asked.
    """

    is_dummy: bool
    num_rows: int
    num_tokens: int
    shared: SharedValues
    query_start_host: Offsets
    seq_lens: torch.Tensor
    max_query: int
    max_context: int
    total_context: int
    has_prior: torch.Tensor | None
    has_prefix: bool
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    groups: Sequence[GroupValues]
    state_read: torch.Tensor | None
    state_write: torch.Tensor | None
    states: States | None = None
    own_start: torch.Tensor | None = None
