"""The rows of the decode graphs: values on the host, changed where something changed, and the copy that graphs read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stepbind.groups import CacheGroup
from stepbind.hosts.local import request

STAGES = 3
"""Pinned copies taken in turn: one may still be read by the device while the next is written."""


class DecodeRows:
    """Lengths, block tables and next tokens of up to `max_rows` sequences, live ones first.

    query_len, prior_len: [R] int32; tables: [R, C] int32 of each group, physical blocks; token: [R] int32, each row's
    next input. The device's `prior_len` and `token` are advanced by the graphs themselves; the host says the same of
    `prior_len`, and of `token` only when it sets the rows.
    """

    def __init__(
        self, groups: tuple[CacheGroup, ...], *, max_rows: int, max_context: int, device: torch.device
    ) -> None:
        self.groups, self.max_rows, self.device = groups, max_rows, device
        self._columns = [-(-max_context // group.block_size) for group in groups]
        words = max_rows * (2 + sum(self._columns))
        pinned = device.type == "cuda"
        self._stages = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(STAGES)]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(STAGES)]
        self._stage = 0
        self._device_words = torch.zeros(words, dtype=torch.int32, device=device)
        self.query_len, self.prior_len, self.tables = self._views(self._device_words)
        self.token = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._words = np.zeros(words, dtype=np.int32)
        self._query_len, self._prior_len, self._tables = self._views(torch.from_numpy(self._words))
        self._sequences: list[request.Sequence] = []

    def set(self, sequences: Sequence[request.Sequence]) -> None:
        """Make these sequences the live rows, each with its last token as next input."""
        tokens = torch.zeros(self.max_rows, dtype=torch.int32)
        query_len, prior_len = self._query_len.numpy(), self._prior_len.numpy()
        for row, sequence in enumerate(sequences):
            tokens[row] = sequence.tokens[-1]
            prior_len[row] = sequence.computed
            if row < len(self._sequences) and self._sequences[row] is sequence:
                continue
            for index, table in enumerate(self._tables):
                entries = sequence.tables[index]
                table[row, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
                table[row, len(entries) :] = -1
        live = len(sequences)
        query_len[:live], query_len[live:], prior_len[live:] = 1, 0, 0
        self._sequences = list(sequences)
        self._add_new_blocks()
        self.token.copy_(tokens)
        self._upload()

    def go_on(self) -> None:
        """The same rows, one token further; tokens stay where the last graph left them."""
        self._prior_len[: len(self._sequences)] += 1
        if self._add_new_blocks():
            self._upload()

    def _add_new_blocks(self) -> bool:
        """Enter the blocks of rows whose next token is the first of a block. Returns whether there were any."""
        found = False
        prior = self._prior_len.numpy()[: len(self._sequences)]
        for index, group in enumerate(self.groups):
            for row in np.flatnonzero(prior % group.block_size == 0).tolist():
                column = int(prior[row]) // group.block_size
                self._tables[index][row, column] = self._sequences[row].tables[index][column]
                found = True
        return found

    def _upload(self) -> None:
        event = self._copied[self._stage]
        if event is not None:
            event.synchronize()  # of the copy three uploads ago
        stage = self._stages[self._stage]
        stage.numpy()[:] = self._words
        self._device_words.copy_(stage, non_blocking=True)
        if event is not None:
            event.record()
        self._stage = (self._stage + 1) % STAGES

    def _views(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        rows = self.max_rows
        query_len, prior_len, rest = words[:rows], words[rows : 2 * rows], words[2 * rows :]
        tables = []
        for columns in self._columns:
            tables.append(rest[: rows * columns].view(rows, columns))
            rest = rest[rows * columns :]
        return query_len, prior_len, tables
