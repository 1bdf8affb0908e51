"""The usual passes on the host, in a few calls: what a serving engine binds thousands of times.

They have their values on the host, every block in its place, and positions that count tokens; hybrids have tables in
physical blocks. Compiled code (`usual.c`) looks at all of that and computes the values in one call. Whatever is
otherwise goes the general way (`read`, `passes.compute_on_host`), which says what is wrong; where the package was
installed without a C compiler, so does everything. Tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from stepbind.targets.atom.computed import Computed, States
from stepbind.targets.atom.groups import AtomGroups
from stepbind.targets.atom.metadata import Profile
from stepbind.targets.atom.native import native
from stepbind.targets.atom.read import Offsets, one_each
from stepbind.targets.atom.shared import SharedValues, upto
from stepbind.targets.atom.usual_tables import Tensors, UsualGroups, usual_tables

_TABLE = "kv_cache_kernel_block_id_device"
_COMMON = (_TABLE, f"{_TABLE}_by_group", "kv_cache_block_id_device", "kv_cache_layer_to_group")
_PLUS_ONE, _STARTS = "sequence_lengths_plus_1_device", ("cu_seqlens", "cu_seqlens_device")
_of_decode = attrgetter(*_COMMON, "input_lengths", "prefix_lengths", "sequence_lengths", _PLUS_ONE, *_STARTS)
_of_prefill = attrgetter(
    *_COMMON,
    _PLUS_ONE,
    "input_lengths",
    "input_lengths_device",
    "prefix_lengths",
    "prefix_lengths_device",
    *_STARTS,
)


class UsualInputs(NamedTuple):
    """What an eager pass is read from. Not looked at yet: neither shapes nor dtypes nor values.

    attn_inputs: of the first group. lengths: in decode new tokens, those of prefixes (empty), tokens in the cache,
    contexts, offsets; in prefill the plus-one field, new tokens, those in the cache, offsets. What the host and the
    device both have is there twice, the host's first. tables: of each group, or of the store for the first one, where
    it has one and `physical`; is_store_alike: whether that has the shape of the group's own, or as many rows where it
    is not read.
    """

    attn_inputs: Any
    is_prefill: bool
    lengths: list[Any]
    layer_to_group: torch.Tensor | None
    tags: tuple[str, ...]
    tables: list[torch.Tensor]
    is_store_alike: bool


def usual_inputs(inputs: Any, *, physical: bool) -> UsualInputs | None:
    """None for a pass in a graph, one that verifies drafts, one whose inputs lack a field. physical: by `Profile`."""
    try:
        first, tags, is_store_alike = inputs.attention_inputs, (), True
        others: list[Any] = []
        if not hasattr(first, "is_prefill") and isinstance(first, Mapping):  # the second alone costs six times as much
            tags = tuple(first)
            first, *others = first.values()
        if first.is_cuda_graph or getattr(first, "is_target_verify", False):
            return None
        is_prefill = first.is_prefill
        table, tables, store, to_group, *lengths = (_of_prefill if is_prefill else _of_decode)(first)
        if others or not tables:
            tables = [table, *[each.kv_cache_kernel_block_id_device for each in others]]
        if store is not None and store.numel():
            shape, own = store.shape, tables[0].shape
            if physical:
                is_store_alike, tables = shape == own, [store, *tables[1:]]
            else:
                is_store_alike = len(shape) == 2 and shape[0] == own[0]
        if tables[0] is None:
            return None
    except (AttributeError, ValueError, TypeError):  # the last one for what is None
        return None
    return UsualInputs(first, is_prefill, lengths, to_group, tags, tables, is_store_alike)


def has_none(values: Sequence[Any]) -> bool:
    return any(map(is_, values, repeat(None)))


def usual_pass(
    given: UsualInputs, inputs: Any, positions: torch.Tensor, profile: Profile, groups: AtomGroups
) -> Computed | None:
    """None for a pass that is not usual. inputs: what `given` was read from."""
    if groups.first_paged < 0 or native is None:
        return None
    return (_prefill if given.is_prefill else _decode)(given, inputs, positions, profile, groups)


def _decode(
    given: UsualInputs, inputs: Any, positions: torch.Tensor, profile: Profile, groups: AtomGroups
) -> Computed | None:
    """One token a row, behind at least one in the cache, by the host's lengths and the plus-one field."""
    rows = positions.numel()
    new, prefix, prior, context, _, start = given.lengths
    tables = usual_tables(given, inputs, profile, groups)
    if tables is None or size_of(new) != rows or size_of(prefix):
        return None
    found = native.decode(
        prior,
        context,
        start,
        positions,
        tables.own,
        tables.sizes,
        tables.limits,
        groups.paged,
        bool(groups.state_groups),
    )
    if found is None:
        return None
    longest, total, *values = found
    return computed_of(
        groups,
        tables.first,
        UsualGroups(tables.own, groups, *values),
        states_of(groups, groups.state_index, False, *values[1:]),
        shared=SharedValues(_one_each(rows), _rows(rows) if profile.sparse_fields else None, None, None),
        start=one_each(rows),
        context=context,
        has_prior=None,
        sizes=UsualSizes(rows, rows, 1, longest, total, False),
    )


def _prefill(
    given: UsualInputs, inputs: Any, positions: torch.Tensor, profile: Profile, groups: AtomGroups
) -> Computed | None:
    """At least one token a row, by the host's lengths, the same ones on the device, and the offsets."""
    plus_one, new, _, prior, prior_device, _, start = given.lengths
    if profile.prefill_context_is_plus_one and size_of(plus_one):
        return None
    tables = usual_tables(given, inputs, profile, groups)
    if tables is None:
        return None
    found = native.prefill(
        new,
        prior,
        prior_device,
        start,
        positions,
        tables.own,
        tables.sizes,
        tables.limits,
        groups.paged,
        bool(groups.state_groups),
        profile.sparse_fields,
    )
    if found is None:
        return None
    longest, total, most, has_prefix, slots, read, write, (context, has_prior, *by_token) = found
    return computed_of(
        groups,
        tables.first,
        UsualGroups(tables.own, groups, slots, read, write),
        states_of(groups, groups.state_index, True, read, write),
        shared=SharedValues(start, *by_token),
        start=start.numpy(),
        context=context,
        has_prior=has_prior if groups.state_groups else None,
        sizes=UsualSizes(new.numel(), positions.numel(), most, longest, total, has_prefix),
    )


class UsualSizes(NamedTuple):
    rows: int
    tokens: int
    max_query: int
    max_context: int
    total_context: int
    has_prefix: bool


def computed_of(
    groups: AtomGroups,
    first_table: torch.Tensor,
    values: UsualGroups,
    states: States | None,
    *,
    shared: SharedValues,
    start: Offsets,
    context: torch.Tensor,
    has_prior: torch.Tensor | None,
    sizes: UsualSizes,
) -> Computed:
    """states: of `states_of`, the pass's own."""
    first_slots = values.slots[groups.paged[groups.first_paged]]
    assert first_slots is not None
    key = 0, has_prior is not None
    return Computed(
        is_dummy=False,
        num_rows=sizes.rows,
        num_tokens=sizes.tokens,
        shared=shared,
        query_start_host=start,
        seq_lens=context,
        max_query=sizes.max_query,
        max_context=sizes.max_context,
        total_context=sizes.total_context,
        has_prior=has_prior,
        has_prefix=sizes.has_prefix,
        block_table=first_table,
        slot_mapping=first_slots,
        groups=values,
        state_read=None if states is None else states.read[key],
        state_write=None if states is None else states.write[key],
        states=states,
    )


def states_of(
    groups: AtomGroups, index: dict[int, int], is_prefill: bool, read: Tensors, write: Tensors
) -> States | None:
    """State slots by the host's groups; None without Gated DeltaNet. index: which of `read` and `write` they have."""
    if not groups.state_groups:
        return None
    keys = [((number, is_prefill), i) for number, i in index.items()]
    return States({key: read[i] for key, i in keys}, {key: write[i] for key, i in keys})


def size_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()


@lru_cache(maxsize=1024)
def _rows(rows: int) -> torch.Tensor:
    """0 .. B-1, int32; nobody writes to it."""
    return upto(rows)


@lru_cache(maxsize=1024)
def _one_each(rows: int) -> torch.Tensor:
    return torch.from_numpy(one_each(rows))
