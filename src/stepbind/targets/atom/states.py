"""State slots of one layer straight from the host's inputs, for callers that keep no cache of them."""

from __future__ import annotations

from typing import Any

import torch

from stepbind.errors import BlockFaultError, StepError
from stepbind.targets.atom.api import capturing
from stepbind.targets.atom.read import prefix_of, read_attention


def state_slots_of_layer(
    attn_inputs: Any, is_prefill: bool, device: torch.device, block_size: int, number: int
) -> torch.Tensor:
    """[B] int32: the block of each row's last new token in the table of group `number`, -1 for none.

    Raises `StepError` for bad input, and `BlockFaultError` for a missing block where looking costs no wait.
    """
    if block_size <= 0:
        raise StepError("seq_size_per_block", block_size, "at least 1 token")
    host = read_attention(attn_inputs)
    if not 0 <= number < len(host.tables):
        raise StepError("cache group", number, f"a group number, 0 .. {len(host.tables) - 1}")
    if is_prefill:
        prefix = prefix_of(host, device_first=True).to(device)
        last = prefix + host.input_len.to(device) - 1
    elif host.plus_one is not None:
        last = host.plus_one.to(device) - 1
    else:
        assert host.sequence_len is not None
        last = host.sequence_len.to(device)
    table = host.tables[number].to(device)
    column = last.div(block_size, rounding_mode="floor").long()
    inside = (column >= 0) & (column < table.shape[1])
    entry = table.gather(1, torch.where(inside, column, 0)[:, None]).squeeze(1)
    slot = torch.where(inside & (entry > 0), entry, -1)
    in_graph = capturing() or host.graph_flag
    if device.type == "cpu" and not in_graph and bool((slot < 0).any()):
        row = int((slot < 0).nonzero()[0])
        raise BlockFaultError(
            f"block table of group {number}", f"no block for the last token of row {row}", "a block for every new token"
        )
    return slot
