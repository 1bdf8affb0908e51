"""Which table a group has, and tables at the granularity that ATOM's fields have: physical blocks, and kernel blocks
for the indexer."""

from __future__ import annotations

from functools import lru_cache

import torch

from stepbind.hosts.rtp_llm.groups import GroupSource
from stepbind.step import Granularity
from stepbind.targets.atom.groups import AtomGroups, granularity
from stepbind.targets.atom.metadata import Profile
from stepbind.targets.atom.read import AtomPass
from stepbind.targets.atom.values import GroupTable


def group_table(source: GroupSource, host: AtomPass, profile: Profile, max_context: int | None) -> GroupTable:
    """A group's own table; where the first one's fields come from the store's table, so does this."""
    if source.table == 0 and profile.physical_table and host.store is not None:
        return GroupTable(0, source.group, host.store, Granularity.PHYSICAL)
    blocks = host.tables[source.table]
    return GroupTable(source.table, source.group, blocks, granularity(source, host, profile, max_context))


def first_table(host: AtomPass, profile: Profile, groups: AtomGroups, max_context: int | None) -> torch.Tensor:
    """The first group's table as ATOM's fields have it: the store's where there is one (seed behaviours 4 and 6)."""
    if not profile.physical_table:
        return host.tables[0]
    if host.store is not None:
        return host.store
    ratio = groups.block_size // groups.kernel_block_size
    return to_physical(host.tables[0], ratio, first_granularity(host, profile, groups, max_context), None)


def first_granularity(host: AtomPass, profile: Profile, groups: AtomGroups, max_context: int | None) -> Granularity:
    for source in groups.sources:
        if source.table == 0:
            return granularity(source, host, profile, max_context)
    return Granularity.PHYSICAL


def to_physical(table: torch.Tensor, ratio: int, granularity: Granularity, out: torch.Tensor | None) -> torch.Tensor:
    """[B, C] physical ids of a kernel table: every ratio-th column divided by the ratio, -1 kept (seed behaviour 4).
    One in physical blocks stays as it is. `out`: where to, in a captured pass."""
    if ratio == 1 or granularity is Granularity.PHYSICAL:
        return table
    # -1 // ratio is -1.
    return torch.div(table[:, ::ratio], ratio, rounding_mode="floor", out=out)


def to_kernel(table: torch.Tensor, ratio: int, out: torch.Tensor | None) -> torch.Tensor:
    """[B, C * ratio] kernel ids of a physical table, -1 kept (seed behaviour 5)."""
    if ratio == 1:
        return table
    inner = _upto(ratio, table.device)
    expanded = None if out is None else out.view(*table.shape, ratio)
    expanded = torch.add(inner, table[..., None], alpha=ratio, out=expanded)
    return expanded.clamp_(min=-1).flatten(1)  # -1 became -ratio .. -1


@lru_cache(maxsize=64)
def _upto(count: int, device: torch.device) -> torch.Tensor:
    """0 .. count-1, int32; nobody writes to it."""
    return torch.arange(count, dtype=torch.int32, device=device)
