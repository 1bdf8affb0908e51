"""Block pools: who owns which block. Block 0 belongs to nobody."""

from __future__ import annotations

from collections.abc import Iterable

from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.hosts.local.pool import BlockPool
from stepbind.hosts.local.prefix import Node, Prefixes
from stepbind.hosts.local.request import Sequence


class BlockManager:
    """The pools of all groups, and the tables of the sequences that live on them.

    An attention group keeps a block for every column. A state group keeps the column that the next pass reads, the
    one that it writes, and every `keep_state_every`-th one (0: none), as a host does that wants to reuse prefixes.

    With `reuse_prefixes`, full blocks are remembered and a sequence begins behind those that its prompt begins with.
    Raises `StepError` for that where a state group keeps no state to resume from, or block sizes differ.
    """

    def __init__(self, groups: tuple[CacheGroup, ...], keep_state_every: int, *, reuse_prefixes: bool = False) -> None:
        if reuse_prefixes:
            _check_reuse(groups, keep_state_every)
        self.pools = tuple(BlockPool(group) for group in groups)
        self.prefixes = Prefixes(self.pools)
        self.keep_state_every = keep_state_every
        self.reuse_prefixes = reuse_prefixes

    def blocks_needed(self, max_len: int, resumed: int = 0) -> list[int]:
        """Blocks of each group that a sequence of `max_len` tokens can own at one time, beside the first `resumed`
        columns that it shares."""
        return [self._needed(pool.group, max_len, resumed) for pool in self.pools]

    def _needed(self, group: CacheGroup, max_len: int, resumed: int) -> int:
        columns = -(-max_len // group.block_size)
        if group.kind is not GroupKind.STATE:
            return columns - resumed
        every = self.keep_state_every
        kept = columns // every - resumed // every if every else 0
        return min(columns - resumed, 2 + kept)

    def fits(self, sequence: Sequence) -> bool:
        """Whether `admit` would succeed right now."""
        return self._fits(sequence, self.prefixes.find(sequence.tokens))

    def _fits(self, sequence: Sequence, path: list[Node]) -> bool:
        # What is shared cannot be given up any more: never more blocks than it saves, so that a hit is no obstacle.
        unused = [node for node in path if node.users == 0]
        needed = self.blocks_needed(sequence.max_len, len(path))
        return all(
            pool.available - sum(node.blocks[index] >= 0 for node in unused) >= needed[index]
            for index, pool in enumerate(self.pools)
        )

    def admit(self, sequence: Sequence) -> bool:
        """Promise a sequence all the blocks that it can come to need, behind the prefix that is remembered of its
        prompt. False, and nothing done, where the pools do not have so many to promise right now."""
        path = self.prefixes.find(sequence.tokens)
        if not self._fits(sequence, path):
            return False
        self.prefixes.hold(path)
        sequence.prefix = path
        sequence.computed = sequence.reused = len(path) * self.prefixes.block_size
        sequence.reserved = self.blocks_needed(sequence.max_len, len(path))
        sequence.tables = [[node.blocks[index] for node in path] for index in range(len(self.pools))]
        for pool, count in zip(self.pools, sequence.reserved, strict=True):
            pool.reserve(count)
        return True

    def extend(self, sequence: Sequence, query_len: int) -> None:
        """Give a sequence the blocks that its next `query_len` tokens are written to."""
        end = sequence.computed + query_len
        for index, pool in enumerate(self.pools):
            table, size = sequence.tables[index], pool.group.block_size
            while len(table) < -(-end // size):
                column = len(table)
                wanted = pool.group.kind is not GroupKind.STATE or column == (end - 1) // size or self._is_kept(column)
                table.append(self._take(pool) if wanted else -1)
                sequence.reserved[index] -= wanted

    def drop_read_states(self, sequence: Sequence, query_len: int) -> None:
        """After a pass of `query_len` tokens: the state that it read is not read again if it wrote another block."""
        for index, pool in enumerate(self.pools):
            if pool.group.kind is not GroupKind.STATE or sequence.computed == 0:
                continue
            size, table = pool.group.block_size, sequence.tables[index]
            read = (sequence.computed - 1) // size
            write = (sequence.computed + query_len - 1) // size
            if read == write or self._is_kept(read):
                continue
            pool.give_back(table[read])
            table[read] = -1
            pool.reserve(1)
            sequence.reserved[index] += 1

    def remember(self, sequence: Sequence) -> None:
        """Let others find the full blocks that a sequence has computed. Its last pass may still run: what they read,
        they read in a later one."""
        if not self.reuse_prefixes or not sequence.remembered:
            return
        size = self.prefixes.block_size
        known = min(sequence.computed, len(sequence.tokens))  # a pass can run before its input token is known here
        for column in range(len(sequence.prefix), known // size):
            blocks = tuple(
                sequence.tables[index][column]
                if pool.group.kind is not GroupKind.STATE or self._is_kept(column)
                else -1
                for index, pool in enumerate(self.pools)
            )
            tokens = tuple(sequence.tokens[column * size : (column + 1) * size])
            parent = sequence.prefix[-1] if sequence.prefix else None
            sequence.prefix.append(self.prefixes.enter(parent, tokens, blocks))

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Find nothing again that was computed so far, by these live sequences (all there are) or before them."""
        sequences = list(sequences)
        self.prefixes.forget(node for sequence in sequences for node in sequence.prefix)
        for sequence in sequences:
            sequence.remembered = False

    def release(self, sequence: Sequence) -> None:
        """Take everything back that a sequence owns or was promised, but for what is remembered of it."""
        self.remember(sequence)
        for index, pool in enumerate(self.pools):
            for column, block in enumerate(sequence.tables[index]):
                remembered = column < len(sequence.prefix) and sequence.prefix[column].blocks[index] == block
                if block >= 0 and not remembered:
                    pool.give_back(block)
            pool.unreserve(sequence.reserved[index])
        self.prefixes.let_go(sequence.prefix)
        sequence.tables, sequence.reserved, sequence.prefix = [], [], []

    def _take(self, pool: BlockPool) -> int:
        while pool.empty:
            self.prefixes.give_up_oldest()
        return pool.take()

    def _is_kept(self, column: int) -> bool:
        return self.keep_state_every > 0 and (column + 1) % self.keep_state_every == 0


def _check_reuse(groups: tuple[CacheGroup, ...], keep_state_every: int) -> None:
    if not keep_state_every and any(group.kind is GroupKind.STATE for group in groups):
        # No default: a kept state can take more memory than all its block's keys and values.
        expected = "at least 1 with reuse_prefixes: layers with a recurrent state resume from kept ones alone"
        raise StepError("keep_state_every", keep_state_every, expected)
    sizes = sorted({group.block_size for group in groups})
    if len(sizes) > 1:
        raise StepError("block_size", sizes, "one for all groups with reuse_prefixes")
