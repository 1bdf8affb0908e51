"""Which tables a usual pass reads, and its groups' values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepbind.groups import GroupKind
from stepbind.targets.atom.groups import AtomGroups
from stepbind.targets.atom.metadata import Profile
from stepbind.targets.atom.read import read
from stepbind.targets.atom.tables import first_table, group_table
from stepbind.targets.atom.values import GroupValues

if TYPE_CHECKING:
    from stepbind.targets.atom.usual import UsualInputs


Tensors = tuple[torch.Tensor | None, ...]
"""One for each of `AtomGroups.sources`, None for those that have none of the kind."""


class UsualTables(NamedTuple):
    """first: the first group's, as the reference's field has it. own, sizes: of each of `AtomGroups.sources` its table
    [B, C] and the tokens of an entry. limits: an entry is good from the first on and below the second, in all of them.
    """

    first: torch.Tensor
    own: list[torch.Tensor]
    sizes: tuple[int, ...]
    limits: tuple[int, int]


def usual_tables(given: UsualInputs, inputs: Any, profile: Profile, groups: AtomGroups) -> UsualTables | None:
    """None for tables that are not usual. inputs: what `given` was read from."""
    if groups.has_kernel_blocks:
        return _kernel_tables(given, inputs, profile, groups)
    if not given.is_store_alike:
        return None
    tables = given.tables
    own = [tables[source.table] for source in groups.sources]
    return UsualTables(tables[0], own, groups.sizes, (1, groups.fewest_blocks))


def _kernel_tables(given: UsualInputs, inputs: Any, profile: Profile, groups: AtomGroups) -> UsualTables | None:
    if given.is_prefill:
        _, new, _, prior, *_ = given.lengths
    else:
        new, _, prior, *_ = given.lengths
    if new is None or prior is None or not (new.is_cpu and prior.is_cpu and new.shape == prior.shape):
        return None
    longest, host = int((prior + new).max()), read(inputs)
    chosen = [group_table(source, host, profile, longest) for source in groups.sources]
    most = max([table.ids_per_block for table in chosen])
    if groups.state_groups and most > 1:
        return None
    return UsualTables(
        first_table(host, profile, groups, longest),
        [table.blocks for table in chosen],
        tuple([table.tokens_per_entry for table in chosen]),
        (most, min([table.group.num_blocks * table.ids_per_block for table in chosen])),
    )


class UsualGroups(Sequence[GroupValues]):
    """Values of each group, made when they are first looked at: ATOM's own layers read the metadata's fields."""

    def __init__(
        self, tables: list[torch.Tensor], groups: AtomGroups, slots: Tensors, read: Tensors, write: Tensors
    ) -> None:
        """slots [T] int64, read and write [B] int32: of each of `AtomGroups.sources`, and perhaps others behind."""
        self.slots, self.read, self.write = slots, read, write
        self._tables, self._sources = tables, groups.sources

    @cached_property
    def _values(self) -> tuple[GroupValues, ...]:
        values = []
        for index, (source, table) in enumerate(zip(self._sources, self._tables, strict=True)):
            number, group = source.table, source.group
            if group.kind is GroupKind.STATE:
                states = self.read[index], self.write[index]
                values.append(GroupValues(number, group.kind, group.layers, table, None, *states))
            else:
                values.append(GroupValues(number, group.kind, group.layers, table, self.slots[index]))
        return tuple(values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._sources)
