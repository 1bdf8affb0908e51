"""Block pools: who owns which block. Block 0 belongs to nobody."""

from __future__ import annotations

from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.hosts.local.request import Sequence


class BlockPool:
    """Free blocks of one group. Blocks are promised (`reserve`) before they are taken, so that taking never fails."""

    def __init__(self, group: CacheGroup) -> None:
        self.group = group
        self._free = list(range(group.num_blocks - 1, group.first_block - 1, -1))
        self._promised = 0

    @property
    def capacity(self) -> int:
        """Blocks that requests can own, in total."""
        return self.group.num_blocks - self.group.first_block

    @property
    def available(self) -> int:
        """Blocks that are neither owned nor promised."""
        return len(self._free) - self._promised

    def reserve(self, count: int) -> None:
        if count > self.available:
            raise StepError(f"pool of group {self.group.name!r}", f"{count} blocks", f"at most {self.available}")
        self._promised += count

    def unreserve(self, count: int) -> None:
        self._promised -= count

    def take(self) -> int:
        """A block out of those promised."""
        self._promised -= 1
        return self._free.pop()

    def give_back(self, block: int) -> None:
        self._free.append(block)


class BlockManager:
    """The pools of all groups, and the tables of the sequences that live on them.

    An attention group keeps a block for every column. A state group keeps the column that the next pass reads, the
    one that it writes, and every `keep_state_every`-th one (0: none), as a host does that wants to reuse prefixes.
    """

    def __init__(self, groups: tuple[CacheGroup, ...], keep_state_every: int) -> None:
        self.pools = tuple(BlockPool(group) for group in groups)
        self.keep_state_every = keep_state_every

    def blocks_needed(self, max_len: int) -> list[int]:
        """Blocks of each group that a sequence of `max_len` tokens can own at one time."""
        return [self._needed(pool.group, max_len) for pool in self.pools]

    def _needed(self, group: CacheGroup, max_len: int) -> int:
        columns = -(-max_len // group.block_size)
        if group.kind is not GroupKind.STATE:
            return columns
        kept = columns // self.keep_state_every if self.keep_state_every else 0
        return min(columns, 2 + kept)

    def fits(self, max_len: int) -> bool:
        """Whether the pools have this many blocks to promise right now."""
        needed = self.blocks_needed(max_len)
        return all(pool.available >= count for pool, count in zip(self.pools, needed, strict=True))

    def admit(self, sequence: Sequence) -> None:
        """Promise a sequence all the blocks that it can come to need."""
        sequence.reserved = self.blocks_needed(sequence.max_len)
        sequence.tables = [[] for _ in self.pools]
        for pool, count in zip(self.pools, sequence.reserved, strict=True):
            pool.reserve(count)

    def extend(self, sequence: Sequence, query_len: int) -> None:
        """Give a sequence the blocks that its next `query_len` tokens are written to."""
        end = sequence.computed + query_len
        for index, pool in enumerate(self.pools):
            table, size = sequence.tables[index], pool.group.block_size
            while len(table) < -(-end // size):
                column = len(table)
                wanted = pool.group.kind is not GroupKind.STATE or column == (end - 1) // size or self._is_kept(column)
                table.append(pool.take() if wanted else -1)
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

    def release(self, sequence: Sequence) -> None:
        """Take everything back that a sequence owns or was promised."""
        for pool, table, count in zip(self.pools, sequence.tables, sequence.reserved, strict=True):
            for block in table:
                if block >= 0:
                    pool.give_back(block)
            pool.unreserve(count)
        sequence.tables, sequence.reserved = [], []

    def _is_kept(self, column: int) -> bool:
        return self.keep_state_every > 0 and (column + 1) % self.keep_state_every == 0
