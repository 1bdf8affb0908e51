"""Cache groups: layers that share a block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from stepbind.errors import StepError


class GroupKind(Enum):
    """How the layers of a group use their blocks."""

    ATTENTION = "attention"  # key and value pages, one slot a token
    LATENT = "latent"  # one compressed vector and one rotary key a token (MLA)
    STATE = "state"  # recurrent and convolution state, one slot a block


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table, and how that table divides the sequence.

    `block_size` and `kernel_block_size` are in tokens, `num_blocks` counts physical blocks, reserved ones
    included. A physical block p is kernel blocks p*ratio .. p*ratio + ratio-1. Block ids below `first_block`
    mean "no block": hosts keep block 0 for padding (RTP-LLM's kernels treat an id <= 0 so, engine contract,
    "Blocks"), a host that hands out block 0 says `first_block=0`.

    Raises `StepError` for sizes that are not positive or do not divide, and for an unusable pool.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    block_size: int
    kernel_block_size: int
    num_blocks: int
    first_block: int = 1

    def __post_init__(self) -> None:
        where = f"group {self.name!r}"
        if self.block_size <= 0:
            raise StepError(f"{where} block_size", self.block_size, "at least 1 token")
        if self.kernel_block_size <= 0:
            raise StepError(f"{where} kernel_block_size", self.kernel_block_size, "at least 1 token")
        if self.block_size % self.kernel_block_size:
            raise StepError(
                f"{where} kernel_block_size",
                self.kernel_block_size,
                f"a divisor of block_size {self.block_size}",
            )
        if self.first_block < 0:
            raise StepError(f"{where} first_block", self.first_block, "0 or more")
        if self.num_blocks <= self.first_block:
            raise StepError(f"{where} num_blocks", self.num_blocks, f"more than first_block {self.first_block}")
        if not self.layers:
            raise StepError(f"{where} layers", "none", "at least one layer number")

    @property
    def ratio(self) -> int:
        """Kernel blocks in a physical block."""
        return self.block_size // self.kernel_block_size

    @property
    def num_kernel_blocks(self) -> int:
        return self.num_blocks * self.ratio


_checked: dict[tuple[int, ...], tuple[CacheGroup, ...]] = {}
"""Groups that passed `check_groups`, by their ids. Groups can't change, and are held here, so that no id is reused."""


def check_groups(groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """The groups as a tuple: the same one for the same groups, which are looked at once.

    Raises `StepError` where a name or a layer number occurs twice, or none is given.
    """
    key = tuple(map(id, groups))
    checked = _checked.get(key)
    if checked is None:
        checked = _check_groups(groups)
        if len(_checked) >= 256:  # nobody serves that many models at once; tests do
            _checked.clear()
        _checked[key] = checked
    return checked


def _check_groups(groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    if not groups:
        raise StepError("groups", "none", "at least one cache group")
    names: set[str] = set()
    owner: dict[int, str] = {}
    for group in groups:
        if group.name in names:
            raise StepError("groups", f"{group.name!r} twice", "one group per name")
        names.add(group.name)
        for layer in group.layers:
            if layer in owner:
                raise StepError(
                    f"group {group.name!r} layers",
                    f"layer {layer}, which group {owner[layer]!r} has too",
                    "each layer in one group",
                )
            owner[layer] = group.name
    return tuple(groups)
