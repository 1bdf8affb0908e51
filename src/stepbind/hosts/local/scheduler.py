"""Which requests run in the next pass, and how much of each: continuous batching with chunked prefill.

A pass is all prefill or all decode, as in the engines that this host stands in for. While both have work they take
turns, so that neither a long prompt nor a full batch of decodes keeps the other waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch

from stepbind.errors import RequestError
from stepbind.groups import CacheGroup
from stepbind.hosts.local.blocks import BlockManager
from stepbind.hosts.local.request import Sequence
from stepbind.step import Phase, Step, make_step


@dataclass(frozen=True, eq=False)
class Batch:
    """One pass: `query_len[i]` new tokens of `sequences[i]`."""

    phase: Phase
    sequences: tuple[Sequence, ...]
    query_len: tuple[int, ...]

    def input_ids(self) -> list[int]:
        """The new tokens, row after row."""
        return [
            token
            for sequence, count in zip(self.sequences, self.query_len, strict=True)
            for token in sequence.tokens[sequence.computed : sequence.computed + count]
        ]

    def finishing(self) -> list[int]:
        """Rows whose last known token is in this pass: they get a next one from it."""
        return [
            row
            for row, (sequence, count) in enumerate(zip(self.sequences, self.query_len, strict=True))
            if sequence.computed + count == len(sequence.tokens)
        ]


class Scheduler:
    """Waiting and running sequences over the block pools.

    A sequence is admitted, first come first served, when every block that it can come to need is free to be promised
    to it. Nothing that runs can then run out of blocks, and out-of-blocks only makes the next one wait.
    """

    def __init__(self, blocks: BlockManager, *, max_rows: int, token_budget: int, max_context: int) -> None:
        self.blocks = blocks
        self.max_rows = max_rows
        self.token_budget = token_budget
        self.max_context = max_context
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._last_phase = Phase.DECODE

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises `RequestError` for one that could never run."""
        if sequence.prompt_len == 0:
            raise RequestError("prompt", "no tokens", "at least one token")
        if sequence.max_len > self.max_context:
            raise RequestError(
                "prompt + max_tokens",
                f"{sequence.prompt_len} + {sequence.params.max_tokens} tokens",
                f"at most {self.max_context + 1}, the context that model and cache allow",
            )
        for pool, count in zip(self.blocks.pools, self.blocks.blocks_needed(sequence.max_len), strict=True):
            if count > pool.capacity:
                raise RequestError(
                    "prompt + max_tokens",
                    f"{sequence.prompt_len} + {sequence.params.max_tokens} tokens, which can need {count} blocks of "
                    f"group {pool.group.name!r}",
                    f"at most the pool's {pool.capacity} blocks of {pool.group.block_size} tokens",
                )
        self.waiting.append(sequence)

    def schedule(self) -> Batch | None:
        """The next pass with its blocks taken, or None when there is nothing to do."""
        decode = [sequence for sequence in self.running if not sequence.prefilling]
        batch = self._prefill() if not decode or self._last_phase is Phase.DECODE else None
        if batch is None and decode:
            batch = Batch(Phase.DECODE, tuple(decode), (1,) * len(decode))
        if batch is None:
            return None
        self._last_phase = batch.phase
        for sequence, count in zip(batch.sequences, batch.query_len, strict=True):
            self.blocks.extend(sequence, count)
        return batch

    def go_on(self, sequences: List[Sequence]) -> Batch | None:
        """One more token of the same rows, before the token that they get now is known: the next pass is the same
        decode again, unless somebody could join it, or one of the rows ends by its length. None where it may not be."""
        could_join = self.waiting and len(self.running) < self.max_rows and self.blocks.fits(self.waiting[0])
        if could_join or len(sequences) != len(self.running) or sequences != self.running:
            return None
        if any(sequence.prefilling or sequence.computed >= sequence.max_len for sequence in sequences):
            return None
        batch = Batch(Phase.DECODE, tuple(sequences), (1,) * len(sequences))
        for sequence in sequences:
            self.blocks.extend(sequence, 1)
        return batch

    def _prefill(self) -> Batch | None:
        """As many prompt tokens as the budget allows, oldest request first. A waiting one is admitted when its turn
        has come, and not before: by then, prefixes that it shares with the others may be computed."""
        rows: list[tuple[Sequence, int]] = []
        left = self.token_budget
        prefilling = deque(sequence for sequence in self.running if sequence.prefilling)
        while left and (prefilling or self._admit_next()):
            sequence = prefilling.popleft() if prefilling else self.running[-1]
            count = min(sequence.prompt_len - sequence.computed, left)
            rows.append((sequence, count))
            left -= count
        return Batch(Phase.PREFILL, tuple(row[0] for row in rows), tuple(row[1] for row in rows)) if rows else None

    def _admit_next(self) -> bool:
        if not self.waiting or len(self.running) >= self.max_rows or not self.blocks.admit(self.waiting[0]):
            return False
        self.running.append(self.waiting.popleft())
        return True

    def done(self, batch: Batch) -> None:
        """The pass ran, or will before any later one: its tokens are in the cache."""
        for sequence, count in zip(batch.sequences, batch.query_len, strict=True):
            self.blocks.drop_read_states(sequence, count)
            sequence.computed += count
            self.blocks.remember(sequence)
            if batch.phase is Phase.PREFILL:
                sequence.chunks.append(count)

    def forget_prefixes(self) -> None:
        """No request finds again what was computed so far."""
        self.blocks.forget(self.running)

    def remove(self, sequence: Sequence) -> None:
        """A sequence ended or was aborted; its blocks are free for others."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.blocks.release(sequence)
        else:
            self.waiting.remove(sequence)


def step_of(batch: Batch, groups: tuple[CacheGroup, ...], device: torch.device) -> Step:
    """What the local host says about a pass: lengths and physical block tables."""
    tables = {}
    for index, group in enumerate(groups):
        columns = max(len(sequence.tables[index]) for sequence in batch.sequences)
        rows = [sequence.tables[index] + [-1] * (columns - len(sequence.tables[index])) for sequence in batch.sequences]
        tables[group.name] = torch.tensor(rows, dtype=torch.int32, device=device)
    prior_len = [sequence.computed for sequence in batch.sequences]
    return make_step(groups, batch.phase, batch.query_len, prior_len, tables)
