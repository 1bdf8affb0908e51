"""Faults of block tables: counted on the device, seen by the host without waiting, raised as a named error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stepbind.errors import BlockFaultError
from stepbind.groups import CacheGroup

NO_FAULT_ROW = 2**31 - 1


@dataclass(frozen=True, eq=False)
class FaultCounts:
    """What the fills of one arena, or of several, found missing or out of range.

    counts: [G, 2] int32 on the device: for each group the entries that were needed, and the lowest row that needed one.
    seen: [1] int32 on the host, not 0 once a fill has counted a fault. For a GPU it is pinned memory that the kernel
        stores to, and only where there is a fault: no good step pays a copy for it. Such a store is a plain one, since
        not all devices can do atomic operations on a host's memory.
    """

    groups: tuple[CacheGroup, ...]
    counts: torch.Tensor
    seen: npt.NDArray[np.int32]

    @staticmethod
    def of(groups: tuple[CacheGroup, ...], device: torch.device) -> FaultCounts:
        with torch.inference_mode(False):  # they are written to in that mode and outside of it
            counts = torch.zeros(len(groups), 2, dtype=torch.int32, device=device)
        counts[:, 1] = NO_FAULT_ROW
        seen = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        return FaultCounts(groups, counts, seen.numpy())

    def add(self, per_row: torch.Tensor) -> None:
        """Add faults [G, B] of rows, by torch operations. Those on a GPU are not seen: that would take a copy, and the
        kernel does without; they are left to `check`."""
        counts = self.counts
        counts[:, 0] += per_row.sum(dim=1)
        row = torch.arange(per_row.shape[1], device=counts.device)
        lowest = torch.where(per_row > 0, row, NO_FAULT_ROW).amin(dim=1)
        counts[:, 1] = torch.minimum(counts[:, 1], lowest)
        if counts.is_cpu:
            self.seen[0] = bool(counts[:, 0].any())

    def raise_seen(self) -> None:
        """Raise `BlockFaultError` for faults of earlier steps as far as the device has come, and forget them. Waits for
        nothing where there are none."""
        if self.seen[0]:
            self.check("earlier steps")

    def check(self, of: str = "") -> None:
        """Raise `BlockFaultError` for faults since the last call, and forget them. Waits for the device, whose streams
        may all have counted here. `of`: whose faults, for the message."""
        self.seen[0] = 0  # before the counts are read: a fault that comes after that sets it again
        if self.counts.is_cuda:
            torch.cuda.synchronize(self.counts.device)
        counts = self.counts.tolist()
        if not any(count for count, _ in counts):
            return
        self.counts[:, 0] = 0
        self.counts[:, 1] = NO_FAULT_ROW
        where = "; ".join(
            f"{count} in group {group.name!r} (first in row {row})"
            for group, (count, row) in zip(self.groups, counts, strict=True)
            if count
        )
        raise BlockFaultError(
            f"block tables of {of}" if of else "block tables",
            f"entries missing or out of range: {where}",
            "a block for every token of every row's context",
        )
