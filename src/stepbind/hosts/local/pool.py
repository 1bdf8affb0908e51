"""The blocks of one cache group: which are free, promised, or remembered and free to be given up."""

from __future__ import annotations

from stepbind.errors import StepError
from stepbind.groups import CacheGroup


class BlockPool:
    """Free blocks of one group. Blocks are promised (`reserve`) before they are taken, so that taking never fails.

    unused: blocks of remembered prefixes that no live sequence uses (`Prefixes` keeps this number). They count as
    available; whoever takes a block gives up prefixes first while the pool is `empty`.
    """

    def __init__(self, group: CacheGroup) -> None:
        self.group = group
        self.unused = 0
        self._free = list(range(group.num_blocks - 1, group.first_block - 1, -1))
        self._promised = 0

    @property
    def capacity(self) -> int:
        """Blocks that requests can own, in total."""
        return self.group.num_blocks - self.group.first_block

    @property
    def available(self) -> int:
        """Blocks that can be promised: neither promised yet nor in use."""
        return len(self._free) + self.unused - self._promised

    @property
    def empty(self) -> bool:
        """Whether no block is free as it is."""
        return not self._free

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
