"""Between the two shapes of a step's tokens: flat [T, ...] and padded by row [B, max_query, ...]."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepbind.plan.plan import Shared


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Where each live token stands: `token` [N] its flat index, `row` [N], `offset` [N] within the row."""

    token: torch.Tensor
    row: torch.Tensor
    offset: torch.Tensor
    rows: int
    max_query: int

    @staticmethod
    def of(shared: Shared, max_query: int) -> RowLayout:
        token = torch.nonzero(shared.row_of_token >= 0).squeeze(1)
        row = shared.row_of_token[token].long()
        offset = token - shared.query_start[row]
        return RowLayout(token, row, offset, shared.query_len.shape[0], max_query)

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [B, max_query, ...], zero where a row has no token."""
        padded = flat.new_zeros(self.rows, self.max_query, *flat.shape[1:])
        padded[self.row, self.offset] = flat[self.token]
        return padded

    def flatten(self, padded: torch.Tensor, tokens: int) -> torch.Tensor:
        """[B, max_query, ...] -> [T, ...], zero for padding tokens."""
        flat = padded.new_zeros(tokens, *padded.shape[2:])
        flat[self.token] = padded[self.row, self.offset]
        return flat
