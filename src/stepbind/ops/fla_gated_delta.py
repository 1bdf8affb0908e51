"""The gated delta rule of long prefills, by flash-linear-attention's chunked kernels (fla-core).

Those go from one state per sequence to one state per sequence. Rows that pass block boundaries owe a state at each of
them, so that their tokens go in rounds: up to the first boundary, then block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from stepbind.ops.decay import Decay
from stepbind.ops.triton_states import gather_states, scatter_states
from stepbind.plan.plan import Shared, Sizes, StatePlan
from stepbind.step import Phase

MIN_TOKENS = 64
"""New tokens of the longest row from which chunks are worth their several launches."""
CHUNK = 64
"""Tokens of one chunk; fla-core's default."""


@cache
def is_installed() -> bool:
    return find_spec("fla") is not None


def serves(value: torch.Tensor, sizes: Sizes) -> bool:
    """Whether this step's rule should be computed here. fla-core's products round to tf32 in float32, so that it is
    for the 16-bit types alone."""
    is_long = sizes.phase is Phase.PREFILL and sizes.max_query >= MIN_TOKENS
    return is_long and value.dtype in (torch.bfloat16, torch.float16) and is_installed()


def chunked_gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor | Decay,
    beta: torch.Tensor,
    recurrent: torch.Tensor,
    plan: StatePlan,
    shared: Shared,
    sizes: Sizes,
) -> torch.Tensor:
    """Arguments and result of `gated_delta.gated_delta`, for a prefill whose host lengths are exact."""
    run = _chunk_function()
    decay = decay.computed() if isinstance(decay, Decay) else decay.float()
    inputs = (query, key, value, decay, beta)
    tokens, rows = sizes.num_tokens, sizes.num_rows
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    out[tokens:] = 0
    states = gather_states(recurrent, plan.state_read[:rows])
    for part in _rounds_on_device(sizes, plan.group.block_size, value.device):
        chosen = [x[:tokens] if part.token is None else x.index_select(0, part.token) for x in inputs]
        before = states if part.row is None else states.index_select(0, part.row)
        result, after = run(
            *[x[None] for x in chosen],
            initial_state=before,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=part.query_start,
            chunk_indices=part.chunk,
        )
        if part.token is None or part.row is None:
            out[:tokens], states = result[0], after
        else:
            out.index_copy_(0, part.token, result[0])
            states.index_copy_(0, part.row, after)
        if part.snapshot.shape[0]:
            slot = plan.snapshots.slot.index_select(0, part.snapshot)
            scatter_states(recurrent, slot, after.index_select(0, part.snapshot_row))
    scatter_states(recurrent, plan.state_write[:rows], states)
    return out


def _chunk_function() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    function: Callable[..., tuple[torch.Tensor, torch.Tensor]] = chunk_gated_delta_rule
    return function


@dataclass(frozen=True, eq=False)
class Round:
    """Tokens that are computed together: some or all rows, each from its state to its next boundary or its end."""

    token: Any  # [n] int64 indices of the tokens, None = all of the step in order
    row: Any  # [m] int64 rows, None = all of the step
    query_start: Any  # [m+1] int64 offsets of the rows' first tokens among the round's
    chunk: Any  # [chunks, 2] int64 (row of the round, number of the chunk within it)
    snapshot: Any  # [k] int64 snapshots that the round ends at
    snapshot_row: Any  # [k] int64 their rows, of the round


def rounds(query: npt.NDArray[np.int64], prior: npt.NDArray[np.int64], block_size: int) -> list[Round]:
    """The rounds of rows with `query` new tokens behind `prior` ones, as numpy arrays."""
    first = (prior // block_size + 1) * block_size - prior  # tokens up to the first boundary
    boundaries = (prior + query - 1) // block_size - prior // block_size
    start, first_snapshot = np.cumsum(query) - query, np.cumsum(boundaries) - boundaries
    out = []
    for number in range(int(boundaries.max()) + 1):
        row = np.flatnonzero(boundaries >= number)
        begin = first[row] + (number - 1) * block_size if number else np.zeros_like(row)
        length = np.minimum(query[row], first[row] + number * block_size) - begin
        query_start = np.concatenate([[0], np.cumsum(length)])
        chunks = -(-length // CHUNK)
        ends = np.flatnonzero(boundaries[row] > number)
        everything = int(boundaries.max()) == 0
        out.append(
            Round(
                token=None if everything else np.repeat(start[row] + begin, length) + _within(length),
                row=None if everything else row,
                query_start=query_start,
                chunk=np.stack([np.repeat(np.arange(row.size), chunks), _within(chunks)], axis=1),
                snapshot=first_snapshot[row[ends]] + number,
                snapshot_row=ends,
            )
        )
    return out


def _within(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0 .. counts[0]-1, 0 .. counts[1]-1, ..."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


_known: WeakKeyDictionary[Sizes, dict[int, list[Round]]] = WeakKeyDictionary()
"""Rounds of the running steps, by block size: every layer of a step has the same ones."""


def _rounds_on_device(sizes: Sizes, block_size: int, device: torch.device) -> list[Round]:
    """The rounds of a step, sent in one copy that is not waited for."""
    by_size = _known.setdefault(sizes, {})
    if block_size in by_size:
        return by_size[block_size]
    host = rounds(sizes.query_len.astype(np.int64), sizes.prior_len.astype(np.int64), block_size)
    arrays = [array for part in host for array in vars(part).values() if array is not None]
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(np.int64))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    sent = iter(flat.split([array.size for array in arrays]))

    def on_device(part: Round) -> Round:
        fields = vars(part).items()
        return Round(**{name: None if x is None else next(sent).view(x.shape) for name, x in fields})

    by_size[block_size] = [on_device(part) for part in host]
    return by_size[block_size]
