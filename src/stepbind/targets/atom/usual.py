"""The usual passes in as few operations as can be: what a serving engine binds thousands of times.

They have their values on the host, every block in its place, and positions that count tokens; hybrids have tables in
physical blocks. Whatever is otherwise goes the general way (`read`, `passes.compute_on_host`), which says what is
wrong; tests hold the two together.

Between two binds a model runs, so all code and data here are cold: what costs is how many calls there are, and how many
different ones, hardly how many rows. Numbers that stand in array operations are arrays themselves (`_number`), which
halves an operation's cost; what fails to be usual is seen on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stepbind.groups import GroupKind
from stepbind.step import INT32_MAX
from stepbind.targets.atom.computed import Computed, States, StateSlots
from stepbind.targets.atom.groups import AtomGroups
from stepbind.targets.atom.metadata import Profile
from stepbind.targets.atom.read import one_each, read
from stepbind.targets.atom.shared import SharedValues, upto, upto32
from stepbind.targets.atom.tables import first_table, group_table
from stepbind.targets.atom.values import GroupValues, Int32, Int64, highest, lowest
from stepbind.targets.atom.values import upto as upto_wide

Array = npt.NDArray[Any]
_from_numpy = torch.from_numpy
_INT32 = np.dtype(np.int32)
_TABLE = "kv_cache_kernel_block_id_device"
_COMMON = (_TABLE, f"{_TABLE}_by_group", "kv_cache_block_id_device", "kv_cache_layer_to_group")
_of_decode = attrgetter("sequence_lengths", "sequence_lengths_plus_1_device", "cu_seqlens_device", *_COMMON)
_of_prefill = attrgetter("input_lengths", "prefix_lengths", "prefix_lengths_device", "cu_seqlens_device", *_COMMON)


class UsualInputs(NamedTuple):
    """What an eager pass is read from: tensors that are all on the host, and arrays over the same memory. Not looked at
    yet: neither shapes nor dtypes nor values.

    attn_inputs: of the first group. tensors, values: in decode the tokens in the cache, context lengths, offsets; in
    prefill the new tokens, those in the cache (twice: the host's and the device's), offsets. tables, table_arrays: of
    each group, or of the store for the first one, where it has one and `physical`; is_store_alike: whether that has the
    shape of the group's own.
    """

    attn_inputs: Any
    is_prefill: bool
    tensors: list[torch.Tensor]
    values: list[Array]
    position: Array
    layer_to_group: Array | None
    tags: tuple[str, ...]
    tables: list[torch.Tensor]
    table_arrays: list[Array]
    is_store_alike: bool


def usual_inputs(inputs: Any, positions: torch.Tensor, *, physical: bool) -> UsualInputs | None:
    """None for a pass in a graph, one that is not all on the host, and one whose inputs lack a field. All arrays are
    made at once: the first one of several costs as much as the others together. physical: by `Profile`."""
    try:
        first, tags, is_store_alike = inputs.attention_inputs, (), True
        others: list[Any] = []
        if isinstance(first, Mapping):
            tags = tuple(first)
            first, *others = first.values()
        if first.is_cuda_graph:
            return None
        is_prefill = first.is_prefill
        *values, table, tables, store, to_group = (_of_prefill if is_prefill else _of_decode)(first)
        if others or not tables:
            tables = [table, *[each.kv_cache_kernel_block_id_device for each in others]]
        if physical and store is not None and store.numel():
            is_store_alike = store.shape == tables[0].shape
            tables = [store, *tables[1:]]
        given = [*values, positions, *tables] if to_group is None else [*values, positions, *tables, to_group]
        arrays = list(map(torch.Tensor.numpy, given))
    except (AttributeError, ValueError, TypeError):  # the last one for what is None, or on a GPU
        return None
    count = len(values)
    end = count + 1 + len(tables)
    own, to_group = arrays[count + 1 : end], arrays[end] if end < len(arrays) else None
    return UsualInputs(
        first, is_prefill, values, arrays[:count], arrays[count], to_group, tags, tables, own, is_store_alike
    )


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
        or not _are(context, token + _ONE)
        or not start.size
        or start.item(-1) > 0
        or lowest(token) <= 0
    ):
        return None
    longest = highest(context)
    tables = _tables(given, inputs, profile, groups, rows, longest)
    if tables is None:
        return None
    tokens = token.astype(np.int64) + (_LAST_AND_NEW if groups.state_groups else _NEW)
    blocks = _blocks(tables, tokens, longest)
    if blocks is None:
        return None
    slots = []
    for index, size in zip(groups.paged, map(tables.sizes.__getitem__, groups.paged), strict=True):
        number = _number(size)
        slot = blocks[index, -1] * number
        slot += tokens[-1] % number
        slots.append(slot)
    slot_tensors = list(map(_from_numpy, slots))
    states = _states(blocks, groups, is_prefill=False)
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
        not new.dtype == start.dtype == _INT32
        or start.size != rows + 1
        or start.item(-1) != tokens
        or not _are(prior_device, prior)
        or lowest(prior) < 0
    ):
        return None
    begin = start[:-1]
    query = start[1:] - begin
    if lowest(query) <= 0:
        return None
    if rows == 1:
        token = upto32(prior.item(0) + tokens)[prior.item(0) :]
    else:
        token = (prior - begin).repeat(query)  # from a token's place in the pass to its number in the row
        token += upto32(tokens)
    if not _are(position, token):
        return None
    context, end = prior + new, prior + query
    longest, last = highest(context), highest(end)
    tables = _tables(given, inputs, profile, groups, rows, longest)
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
        pair -= _ONE
        blocks = _blocks(tables, pair, last)
        if blocks is None:
            return None
        if fresh is not None:
            blocks[:, 0, fresh] = -1
    slots = []
    for index in groups.paged:
        slot = _slots(tables, index, prior, end, begin, tokens, last)
        if slot is None:
            return None
        slots.append(slot)
    shared = SharedValues(given.tensors[3], None, None, None)
    if profile.sparse_fields:
        row = upto32(rows).repeat(query)
        spans = _from_numpy(begin.repeat(query)), upto(tokens + 1)[1:]
        shared = SharedValues(shared.query_start, _from_numpy(row), *spans)
    slot_tensors = list(map(_from_numpy, slots))
    states = _states(blocks, groups, is_prefill=True)
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


class _Tables(NamedTuple):
    """first: the first group's, as the reference's field has it. Of each of `AtomGroups.sources`: own [B, C], the same
    as an array, and the tokens of an entry. An entry is good from `lowest` on and below `end`, in all of them."""

    first: torch.Tensor
    own: list[torch.Tensor]
    arrays: list[Int32]
    sizes: tuple[int, ...]
    lowest: int
    end: int


def _tables(
    given: UsualInputs, inputs: Any, profile: Profile, groups: AtomGroups, rows: int, longest: int
) -> _Tables | None:
    sources, sizes, least, end = groups.sources, groups.sizes, 1, groups.fewest_blocks
    if groups.has_kernel_blocks:
        host = read(inputs)
        chosen = [group_table(source, host, profile, longest) for source in sources]
        ids = [table.ids_per_block for table in chosen]
        if groups.state_groups and max(ids) > 1:
            return None
        own, first = [table.blocks for table in chosen], first_table(host, profile, groups, longest)
        sizes, least = tuple([table.tokens_per_entry for table in chosen]), max(ids)
        end = min([source.group.num_blocks * each for source, each in zip(sources, ids, strict=True)])
        arrays = [table.numpy() for table in own]
    elif not given.is_store_alike:
        return None
    else:
        own, first = [given.tables[source.table] for source in sources], given.tables[0]
        arrays = [given.table_arrays[source.table] for source in sources]
    for array in arrays:
        shape = array.shape
        if len(shape) != 2 or shape[0] != rows or array.dtype != _INT32 or not array.flags.c_contiguous:
            return None
    return _Tables(first, own, arrays, sizes, least, end)


def _blocks(tables: _Tables, tokens: Int64, longest: int) -> Int32 | None:
    """[groups, n, B] entries of the tables for `tokens`, n of each row, the last of which is `longest` - 1. None where
    one is missing. Places are found once for all tables of the same columns and size."""
    count, rows = tokens.shape
    blocks = np.empty((len(tables.arrays), count, rows), dtype=np.int32)
    places: dict[tuple[int, int], Int64] = {}
    for out, table, size in zip(blocks, tables.arrays, tables.sizes, strict=True):
        columns = table.shape[1]
        at = places.get((columns, size))
        if at is None:
            if longest > columns * size:
                return None
            at = places[columns, size] = tokens // _number(size)
            at += _row_starts(rows, columns)
        table.take(at, out=out, mode="clip")
    if lowest(blocks) < tables.lowest or highest(blocks) >= tables.end:
        return None
    return blocks


def _slots(
    tables: _Tables, index: int, prior: Int32, end: Int32, begin: Int32, tokens: int, longest: int
) -> Int64 | None:
    """[T] slots of tokens `prior` .. `end` - 1 of each row, which begin at `begin` in the pass. Block by block: within
    one, slots count as tokens do. None where a block is missing."""
    table, size = tables.arrays[index], tables.sizes[index]
    rows, columns = table.shape
    if longest > columns * size or max(tables.end, tokens) * size > INT32_MAX:
        return None
    number = _number32(size)
    column = prior // number  # of each row, its first one
    count = (end - _ONE) // number
    count -= column
    count += _ONE
    ends = np.add.accumulate(count, dtype=np.int32)
    behind = ends - count
    total = ends.item(-1)
    column -= behind
    at = (column + _row_starts(rows, columns)).repeat(count)
    at += upto32(total)
    block = table.take(at)
    if lowest(block) < tables.lowest or highest(block) >= tables.end:
        return None
    column *= number
    column -= prior
    column += begin
    edge = column.repeat(count)  # where in the pass each block's first slot would be
    edge += upto32(total) * number
    block *= number
    block -= edge
    edge[behind] = begin  # a row's first block is entered behind its first slot
    length = np.empty_like(edge)
    np.subtract(edge[1:], edge[:-1], out=length[:-1])
    length[-1] = tokens - edge.item(-1)
    slot = block.astype(np.int64).repeat(length)
    slot += upto_wide(tokens)
    return slot


def _states(blocks: Int32 | None, groups: AtomGroups, *, is_prefill: bool) -> States | None:
    """blocks: [groups, 2, B], of the last token in the cache and of the last new one."""
    if blocks is None or not groups.state_groups:
        return None
    index_of = groups.state_index
    return States(StateSlots(blocks, 0, index_of, is_prefill), StateSlots(blocks, 1, index_of, is_prefill))


class UsualGroups(Sequence[GroupValues]):
    """Values of each group, made when they are first looked at: ATOM's own layers read the metadata's fields."""

    def __init__(self, tables: _Tables, groups: AtomGroups, slots: list[torch.Tensor], states: States | None) -> None:
        self._of = tables, groups, slots, states

    @cached_property
    def _values(self) -> tuple[GroupValues, ...]:
        tables, groups, slots, states = self._of
        of_paged = dict(zip(groups.paged, slots, strict=True))
        values = []
        for index, (source, table) in enumerate(zip(groups.sources, tables.own, strict=True)):
            number, group = source.table, source.group
            values.append(GroupValues(number, group.kind, group.layers, table, of_paged.get(index)))
            if states is not None and group.kind is GroupKind.STATE:
                read, write = states.read.of(number), states.write.of(number)
                values[-1] = values[-1]._replace(state_read=read, state_write=write)
        return tuple(values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)


def _are(array: Array, values: Int32) -> bool:
    """Whether an array has these values, as int32 or int64."""
    if array.dtype != _INT32:
        return array.dtype == np.int64 and array.shape == values.shape and bool((array == values).all())
    return values.dtype == _INT32 and array.tobytes() == values.tobytes()


def _size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()


_ONE = np.array(1, dtype=np.int32)
_LAST_AND_NEW, _NEW = np.array([[-1], [0]]), np.array([[0]])
"""Added to the number of a new token: itself, behind the one before it where there are states."""


@lru_cache(maxsize=64)
def _number(value: int) -> Int64:
    return np.array(value)


@lru_cache(maxsize=64)
def _number32(value: int) -> Int32:
    return np.array(value, dtype=np.int32)


@lru_cache(maxsize=1024)
def _rows(rows: int) -> torch.Tensor:
    """0 .. B-1, int32; nobody writes to it."""
    return upto(rows)


@lru_cache(maxsize=1024)
def _row_starts(rows: int, columns: int) -> Int64:
    """Flat index of each row's first entry; nobody writes to it."""
    return np.arange(rows) * columns


@lru_cache(maxsize=1024)
def _one_each(rows: int) -> torch.Tensor:
    return torch.from_numpy(one_each(rows))
