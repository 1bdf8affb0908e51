"""Prefixes whose blocks the cache still holds, found again by their tokens.

They form a tree: a node is one full block of tokens behind those of its parents, and knows the block of each group
that holds them. Children are keyed by the tokens themselves: an equal hash is not enough for a hit. A block belongs to
one node, or to one sequence, or is free; it moves from a sequence to a node once it is full, and is not written again.

A sequence holds the nodes that its own tokens begin with, from the root on, so a node that nobody holds has nothing
below it that anybody does. Such nodes are given up, least recently used first, when a pool needs their blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stepbind.hosts.local.pool import BlockPool


@dataclass(eq=False)
class Node:
    """One full block of `tokens`, behind those of its parents. The root has none.

    blocks: one of each group; -1 in a state group that kept no state where this node ends. users: live sequences
    that hold it. forgotten: not in the tree any more, and only there for those.
    """

    parent: Node | None
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    users: int = 0
    forgotten: bool = False
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


class Prefixes:
    """The tree of remembered blocks over the pools that they come from, which all have one block size."""

    def __init__(self, pools: tuple[BlockPool, ...]) -> None:
        self.pools = pools
        self.block_size = pools[0].group.block_size
        self._root = Node(None, (), ())
        # Nodes that nobody holds, least recently used first. A path is let go from its end, so that a node always
        # stands behind all that are below it, and the first one is a leaf.
        self._unused: dict[Node, None] = {}

    def __iter__(self) -> Iterator[Node]:
        """All remembered nodes, parents first."""
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            yield node

    def find(self, prompt: list[int]) -> list[Node]:
        """The longest remembered path that `prompt` begins with and that every group can resume from. At least one
        token of the prompt is left to be computed."""
        node, path, resumable = self._root, [], 0
        for start in range(0, len(prompt) - self.block_size, self.block_size):
            child = node.children.get(tuple(prompt[start : start + self.block_size]))
            if child is None:
                break
            node = child
            path.append(node)
            if min(node.blocks) >= 0:
                resumable = len(path)
        return path[:resumable]

    def enter(self, parent: Node | None, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> Node:
        """The node of one more block of `tokens` behind `parent` (None: the root), held once more.

        It takes `blocks` over, unless other sequences hold the same tokens in other blocks: then these stay the
        caller's, who can tell by `Node.blocks`.
        """
        parent = parent or self._root
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, blocks, users=1)
        elif node.users:
            node.users += 1
        else:
            self.hold([node])
            self._free(node)
            node.blocks = blocks
        return node

    def hold(self, path: Iterable[Node]) -> None:
        """One more live sequence uses these nodes."""
        for node in path:
            if node.users == 0:
                del self._unused[node]
                self._count_unused(node, -1)
            node.users += 1

    def let_go(self, path: list[Node]) -> None:
        """One live sequence less uses these nodes, a path from the root."""
        for node in reversed(path):
            node.users -= 1
            if node.users == 0 and node.forgotten:
                self._free(node)
            elif node.users == 0:
                self._unused[node] = None
                self._count_unused(node, 1)

    def give_up_oldest(self) -> None:
        """Free the blocks of the node whose last use is the longest ago."""
        node = next(iter(self._unused))
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.tokens]
        del self._unused[node]
        self._count_unused(node, -1)
        self._free(node)

    def forget(self, held: Iterable[Node]) -> None:
        """Find none of these prefixes again. `held`: the nodes of all live sequences; their blocks come free later."""
        while self._unused:
            self.give_up_oldest()
        for node in held:
            node.forgotten = True
        self._root.children.clear()

    def _count_unused(self, node: Node, change: int) -> None:
        for pool, block in zip(self.pools, node.blocks, strict=True):
            pool.unused += change * (block >= 0)

    def _free(self, node: Node) -> None:
        for pool, block in zip(self.pools, node.blocks, strict=True):
            if block >= 0:
                pool.give_back(block)
