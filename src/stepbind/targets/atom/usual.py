"""The usual passes in as few operations as can be: what a serving engine binds thousands of times.

They have their values on the host, every block in its place, and positions that count tokens; hybrids have tables in
physical blocks. `usual_inputs` reads them, `usual_tables` looks into their tables. Whatever is otherwise goes the
general way (`read`, `passes.compute_on_host`), which says what is wrong; tests hold the two together.

Between two binds a model runs, so all code and data here are cold: what costs is how many calls there are, and how many
different ones, hardly how many rows. Numbers that stand in array operations are arrays themselves (`as_int64`), which
halves an operation's cost; what fails to be usual is seen on the way.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from stepbind.step import INT32_MAX
from stepbind.targets.atom.computed import Computed
from stepbind.targets.atom.groups import AtomGroups
from stepbind.targets.atom.metadata import Profile
from stepbind.targets.atom.read import one_each
from stepbind.targets.atom.shared import SharedValues, upto, upto32
from stepbind.targets.atom.usual_inputs import Array, UsualInputs
from stepbind.targets.atom.usual_tables import (
    INT32,
    ONE,
    UsualGroups,
    as_int64,
    blocks_at,
    prefill_slots,
    states_of,
    usual_tables,
)
from stepbind.targets.atom.values import Int32, highest, lowest

_from_numpy = torch.from_numpy


def usual_pass(given: UsualInputs, inputs: Any, profile: Profile, groups: AtomGroups) -> Computed | None:
    """None for a pass that is not usual. inputs: what `given` was read from."""
    if groups.first_paged < 0:
        return None
    return (_prefill if given.is_prefill else _decode)(given, inputs, profile, groups)


def _decode(given: UsualInputs, inputs: Any, profile: Profile, groups: AtomGroups) -> Computed | None:
    """One token a row, behind at least one in the cache, by the host's lengths and the plus-one field."""
    token, context, start = given.values
    first, rows = given.attn_inputs, token.size
    if (
        first.input_lengths.numel() != rows
        or _size(first.prefix_lengths)
        or not _are(given.position, token)
        or not _are(context, token + ONE)
        or not start.size
        or start.item(-1) > 0
        or lowest(token) <= 0
    ):
        return None
    longest = highest(token) + 1
    tables = usual_tables(given, inputs, profile, groups, rows, longest)
    if tables is None:
        return None
    tokens = token.astype(np.int64) + (_LAST_AND_NEW if groups.state_groups else _NEW)
    blocks = blocks_at(tables, tokens, longest)
    if blocks is None:
        return None
    slots = []
    for index, size in zip(groups.paged, map(tables.sizes.__getitem__, groups.paged), strict=True):
        number = as_int64(size)
        slot = blocks[index, -1] * number
        slot += tokens[-1] % number
        slots.append(slot)
    slot_tensors = list(map(_from_numpy, slots))
    states = states_of(blocks, groups, is_prefill=False)
    return Computed(
        is_dummy=False,
        num_rows=rows,
        num_tokens=rows,
        shared=SharedValues(_one_each(rows), _rows(rows) if profile.sparse_fields else None, None, None),
        query_start_host=one_each(rows),
        seq_lens=given.tensors[1],
        max_query=1,
        max_context=longest,
        total_context=int(np.add.reduce(context)),
        has_prior=None,
        has_prefix=False,
        block_table=tables.first,
        slot_mapping=slot_tensors[groups.first_paged],
        groups=UsualGroups(tables, groups, slot_tensors, states),
        state_read=None if states is None else states.read.of(0),
        state_write=None if states is None else states.write.of(0),
        states=states,
    )


def _prefill(given: UsualInputs, inputs: Any, profile: Profile, groups: AtomGroups) -> Computed | None:
    """At least one token a row, by the host's lengths, the same ones on the device, and the offsets."""
    if profile.prefill_context_is_plus_one and _size(given.attn_inputs.sequence_lengths_plus_1_device):
        return None
    new, prior, prior_device, start = given.values
    position = given.position
    rows, tokens = new.size, position.size
    if (
        not new.dtype == start.dtype == INT32
        or start.size != rows + 1
        or start.item(0)
        or start.item(-1) != tokens
        or not _are(prior_device, prior)
        or lowest(prior) < 0
        or highest(prior) > INT32_MAX - tokens
    ):
        return None
    begin = start[:-1]
    query = start[1:] - begin
    if lowest(query) <= 0:
        return None
    if rows == 1 and prior.item(0) < _COUNTED:
        token = upto32(prior.item(0) + tokens)[prior.item(0) :]
    else:
        token = (prior - begin).repeat(query)  # from a token's place in the pass to its number in the row
        token += upto32(tokens)
    if not _are(position, token):
        return None
    context, end = prior + new, prior + query
    longest, last = highest(context), highest(end)
    tables = usual_tables(given, inputs, profile, groups, rows, longest)
    if tables is None:
        return None
    blocks = None
    has_prior = prior > 0
    if groups.state_groups:
        fresh = None if lowest(prior) else prior == 0
        pair = np.empty((2, rows), dtype=np.int64)
        pair[0], pair[1] = prior, end
        if fresh is not None:
            pair[0, fresh] = end[fresh]
        pair -= ONE
        blocks = blocks_at(tables, pair, last)
        if blocks is None:
            return None
        if fresh is not None:
            blocks[:, 0, fresh] = -1
    slots = []
    for index in groups.paged:
        slot = prefill_slots(tables, index, prior, end, begin, tokens, last)
        if slot is None:
            return None
        slots.append(slot)
    shared = SharedValues(given.tensors[3], None, None, None)
    if profile.sparse_fields:
        row = upto32(rows).repeat(query)
        spans = _from_numpy(begin.repeat(query)), _from_numpy(upto32(tokens + 1)[1:])
        shared = SharedValues(shared.query_start, _from_numpy(row), *spans)
    slot_tensors = list(map(_from_numpy, slots))
    states = states_of(blocks, groups, is_prefill=True)
    return Computed(
        is_dummy=False,
        num_rows=rows,
        num_tokens=tokens,
        shared=shared,
        query_start_host=start,
        seq_lens=_from_numpy(context),
        max_query=highest(query),
        max_context=longest,
        total_context=int(np.add.reduce(context)),
        has_prior=_from_numpy(has_prior) if groups.state_groups else None,
        has_prefix=highest(prior) > 0,
        block_table=tables.first,
        slot_mapping=slot_tensors[groups.first_paged],
        groups=UsualGroups(tables, groups, slot_tensors, states),
        state_read=None if states is None else states.read.of(0),
        state_write=None if states is None else states.write.of(0),
        states=states,
    )


def _are(array: Array, values: Int32) -> bool:
    """Whether an array has these values, as int32 or int64."""
    if array.dtype != INT32:
        return array.dtype == np.int64 and array.shape == values.shape and bool((array == values).all())
    return values.dtype == INT32 and array.tobytes() == values.tobytes()


def _size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()


_COUNTED = 2**20
"""Tokens in the cache up to which numbers of tokens are cut out of a kept array."""

_LAST_AND_NEW, _NEW = np.array([[-1], [0]]), np.array([[0]])
"""Added to the number of a new token: itself, behind the one before it where there are states."""


@lru_cache(maxsize=1024)
def _rows(rows: int) -> torch.Tensor:
    """0 .. B-1, int32; nobody writes to it."""
    return upto(rows)


@lru_cache(maxsize=1024)
def _one_each(rows: int) -> torch.Tensor:
    return torch.from_numpy(one_each(rows))
