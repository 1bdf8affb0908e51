"""Passes on a GPU like an earlier one: as many rows, and tables in the same places.

The first of its kind becomes a step and a plan (`usual_gpu.py`), and what those hold is kept. Of the others compiled
code looks at the lengths, and one launch fills the same buffers anew. Without that code every pass is a first one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepbind.plan import Arena, PagedPlan, Plan
from stepbind.plan.plan import conv_list_size
from stepbind.step import Step
from stepbind.targets.atom.computed import Computed, States
from stepbind.targets.atom.groups import AtomGroups
from stepbind.targets.atom.native import native
from stepbind.targets.atom.read import one_each
from stepbind.targets.atom.shared import SharedValues
from stepbind.targets.atom.usual import UsualInputs, UsualSizes, computed_of, states_of
from stepbind.targets.atom.usual_tables import Tensors, UsualGroups

if TYPE_CHECKING:
    from stepbind.plan.fill_triton import Launcher
    from stepbind.plan.launch import Call
    from stepbind.targets.atom.prototypes import Prototypes

MAX_KNOWN = 128
"""Kinds of passes that are remembered: a host has a set of tables for each number of rows, or makes them anew."""
MAX_SIZES = 64
"""Numbers of tokens of prefills of one kind whose views are remembered."""

Key = tuple[bytes, bool, bool, int, int]


@dataclass(eq=False)
class Known:
    """What passes of one kind share.

    pointer: to the descriptor. decode: the call that fills one. rows: B. max_context: tokens of a row that arena and
    tables have room for. ones: [B] int32 new tokens of each row of a decode. slots, read, write: of each of
    `AtomGroups.planned`. with_tokens: whether there are values of each token. prototypes: of a decode's objects.
    """

    arena: Arena
    launcher: Launcher
    descriptor: torch.Tensor
    pointer: Any
    decode: Call | None
    groups: AtomGroups
    rows: int
    max_context: int
    ones: torch.Tensor | None
    slots: Tensors
    read: Tensors
    write: Tensors
    states: States | None
    shared: SharedValues
    context_len: torch.Tensor
    has_prior: torch.Tensor | None
    with_tokens: bool
    prototypes: Prototypes | None = None
    by_tokens: dict[tuple[int, int], tuple[Tensors, SharedValues]] = field(default_factory=dict)


def key_of(given: UsualInputs, strict: bool | None, level: int) -> Key | None:
    """What passes of one kind have in common. None for passes that cannot be known."""
    places = None if native is None else native.places(given.tables)
    return None if places is None else (places, given.is_prefill, strict is None, level, threading.get_ident())


def known_of(
    step: Step, arena: Arena, plan: Plan, groups: AtomGroups, values: UsualGroups, shared: SharedValues
) -> Known:
    """What is kept of a first pass. values: of `AtomGroups.planned`."""
    from stepbind.plan.launch import pointer_to  # needs Triton, as plans with a descriptor do

    assert arena.launcher is not None
    assert plan.descriptor is not None
    is_prefill = not step.contexts_on_device
    return Known(
        arena=arena,
        launcher=arena.launcher,
        descriptor=plan.descriptor,
        pointer=pointer_to(plan.descriptor),
        decode=None if is_prefill else arena.launcher.call_of((step.num_rows, step.num_rows, True)),
        groups=groups,
        rows=step.num_rows,
        max_context=min(arena.max_context, step.block_tables.max_context),
        ones=None if is_prefill else step.query_len.device,
        slots=values.slots,
        read=values.read,
        write=values.write,
        states=states_of(groups, groups.planned_states, is_prefill, values.read, values.write),
        shared=shared,
        context_len=plan.shared.context_len,
        has_prior=plan.shared.has_prior if is_prefill and groups.state_groups else None,
        with_tokens=shared.row_of_token is not None,
    )


def remember(kept: dict[Key, Known], key: Key, known: Known) -> None:
    """In the place of the one that has been kept longest, where there are many."""
    if key not in kept and len(kept) >= MAX_KNOWN:
        kept.pop(next(iter(kept)), None)  # another thread may have been faster
    kept[key] = known


class DecodeAgain(NamedTuple):
    """A decode of a known kind, whose values have been filled. longest: the longest context; total: the sum of
    contexts, in tokens."""

    known: Known
    given: UsualInputs
    longest: int
    total: int

    def computed(self) -> Computed:
        known, given, longest, total = self
        return computed_of(
            known.groups,
            given.tables[0],
            self.groups(),
            _states(known),
            shared=known.shared,
            start=one_each(known.rows),
            context=given.lengths[3],
            has_prior=None,
            sizes=UsualSizes(known.rows, known.rows, 1, longest, total, False),
        )

    def groups(self) -> UsualGroups:
        return _groups(self.known, self.given, self.known.slots)


def compute_known(known: Known, given: UsualInputs, tokens: int) -> Computed | DecodeAgain | None:
    """None for a pass that is of another kind after all, good or bad."""
    return (_prefill if given.is_prefill else _decode)(known, given, tokens)


def _decode(known: Known, given: UsualInputs, tokens: int) -> DecodeAgain | None:
    new, prefix, prior, context, start, _ = given.lengths
    if known.ones is None or known.decode is None or tokens != known.rows:
        return None
    found = native.decode_lengths(new, prefix, prior, context, start, tokens, given.tables[0])
    if found is None or found[0] > known.max_context:
        return None
    longest, total, contexts = found
    known.decode.launch(known.pointer, known.ones.data_ptr(), contexts, tokens, *known.decode.arguments)
    return DecodeAgain(known, given, longest, total)


def _prefill(known: Known, given: UsualInputs, tokens: int) -> Computed | None:
    _, new, new_there, prior, prior_there, start, _ = given.lengths
    rows, groups, arena = known.rows, known.groups, known.arena
    if tokens > arena.max_tokens:
        return None
    found = native.prefill_lengths(
        new, new_there, prior, prior_there, start, rows, tokens, given.tables[0], arena.state_sizes
    )
    if found is None or found[1] > known.max_context:
        return None
    most, longest, total, has_prefix, chunks, snapshots, query_len, prior_len = found
    listed = conv_list_size(chunks) if groups.state_groups else chunks
    call = known.launcher.call_of((rows, tokens, False, listed, snapshots))
    call.launch(known.pointer, query_len, prior_len, rows, *call.arguments)
    views = known.by_tokens.get((tokens, listed))
    if views is None:
        if len(known.by_tokens) >= MAX_SIZES:
            del known.by_tokens[next(iter(known.by_tokens))]
        views = known.by_tokens[tokens, listed] = _views(known, tokens, listed)
    slots, shared = views
    return computed_of(
        groups,
        given.tables[0],
        _groups(known, given, slots),
        _states(known),
        shared=shared,
        start=start.numpy(),
        context=known.context_len,
        has_prior=known.has_prior,
        sizes=UsualSizes(rows, tokens, most, longest, total, has_prefix),
    )


def _groups(known: Known, given: UsualInputs, slots: Tensors) -> UsualGroups:
    own = [given.tables[source.table] for source in known.groups.sources]
    return UsualGroups(own, known.groups, slots, known.read, known.write)


def _states(known: Known) -> States | None:
    """The pass's own: ATOM's layers add to them."""
    states = known.states
    return None if states is None else States(states.read.copy(), states.write.copy())


def _views(known: Known, tokens: int, listed: int) -> tuple[Tensors, SharedValues]:
    """Slots, and what all groups share, of so many tokens, with lists of so many convolution chunks."""
    full = known.arena.shared
    slots = tuple([group.slot[:tokens] if isinstance(group, PagedPlan) else None for group in known.arena.groups])
    of_tokens = [full.row_of_token[:tokens], full.span_start[:tokens], full.span_end[:tokens]]
    of_chunks = [full.conv_chunk_row[:listed], full.conv_chunk_index[:listed]]
    return slots, SharedValues(
        known.shared.query_start,
        *(of_tokens if known.with_tokens else (None, None, None)),
        *(of_chunks if known.groups.state_groups else (None, None)),
    )
