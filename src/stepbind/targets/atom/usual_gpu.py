"""The usual passes on a GPU in little of the host's time: sizes from the host's lengths, values by one launch.

As on the host (`usual.py`), what is not usual goes the general way (`read`, `passes.compute_by_plan`); tests hold the
two together.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from stepbind.plan import Plan, StatePlan, build_plan
from stepbind.plan.arena import num_chunks
from stepbind.plan.plan import conv_list_size
from stepbind.step import BlockTable, BlockTables, Lengths, Phase, Step
from stepbind.targets.atom.computed import Computed
from stepbind.targets.atom.groups import AtomGroups
from stepbind.targets.atom.known import DecodeAgain, Key, compute_known, key_of, known_of, remember
from stepbind.targets.atom.metadata import Profile
from stepbind.targets.atom.passes import PlanBuffers
from stepbind.targets.atom.read import Numbers, one_each
from stepbind.targets.atom.shared import of_plan
from stepbind.targets.atom.usual import UsualInputs, UsualSizes, computed_of, has_none, size_of, states_of
from stepbind.targets.atom.usual_tables import Tensors, UsualGroups


def usual_on_gpu(
    given: UsualInputs,
    positions: torch.Tensor,
    profile: Profile,
    groups: AtomGroups,
    buffers: PlanBuffers,
    strict: bool | None,
    level: int,
) -> Computed | DecodeAgain | None:
    """None for a pass that is not usual. strict, level, and what is raised: as in `passes.compute_by_plan`."""
    if groups.first_paged < 0 or groups.has_kernel_blocks or strict or not given.is_store_alike:
        return None
    if given.is_prefill and profile.prefill_context_is_plus_one and size_of(given.lengths[0]):
        return None
    if strict is None:
        buffers.raise_seen()
    tokens, key = positions.numel(), key_of(given, strict, level)
    known = None if key is None else buffers.known.get(key)
    if known is not None and known.groups is groups and known.with_tokens is profile.sparse_fields:
        found = compute_known(known, given, tokens)
        if found is not None:
            return found
    return _compute(given, tokens, profile, groups, buffers, strict, level, key)


def _compute(
    given: UsualInputs,
    tokens: int,
    profile: Profile,
    groups: AtomGroups,
    buffers: PlanBuffers,
    strict: bool | None,
    level: int,
    key: Key | None,
) -> Computed | None:
    """By a step and a plan; from then on such passes are known."""
    if has_none(given.lengths[1:-1] if given.is_prefill else given.lengths[:-1]):
        return None
    step = (_prefill if given.is_prefill else _decode)(given, tokens, groups)
    if step is None:
        return None
    pool = buffers.eager if strict is None else buffers.lenient
    arena = pool.arena_for(step, level)
    plan = build_plan(step, arena, strict=False)
    sizes, prefill = plan.sizes, given.is_prefill
    values = UsualGroups([given.tables[source.table] for source in groups.sources], groups, *_values(plan))
    dtype = torch.int32 if prefill else torch.int64
    shared = of_plan(plan, prefill, dtype, profile.sparse_fields, bool(step.padded_chunks))
    if key is not None and plan.descriptor is not None:
        remember(buffers.known, key, known_of(step, arena, plan, groups, values, shared))
    return computed_of(
        groups,
        given.tables[0],
        values,
        states_of(groups, groups.planned_states, prefill, values.read, values.write),
        shared=shared,
        start=given.lengths[5].numpy() if prefill else one_each(tokens),
        context=plan.shared.context_len if prefill else given.lengths[3],
        has_prior=plan.shared.has_prior if prefill and groups.state_groups else None,
        sizes=UsualSizes(
            step.num_rows,
            tokens,
            sizes.max_query,
            sizes.max_context,
            sizes.total_context,
            prefill and bool(step.prior_len.host.any()),
        ),
    )


def _decode(given: UsualInputs, tokens: int, groups: AtomGroups) -> Step | None:
    """One token a row, behind at least one in the cache, by the host's lengths and the device's plus-one field."""
    new, prefix, prior, context, start, _ = given.lengths
    if new.numel() != tokens or prefix.numel() or prior.numel() != tokens or context.numel() != tokens:
        return None
    prior, start = _on_host(prior), _on_host(start)
    if prior is None or not prior.all() or start is None or (start.size and start.item(-1)):
        return None
    tables = _tables(given, groups)
    if tables is None:
        return None
    return Step(
        Phase.DECODE,
        _ones(tokens, context.device),
        Lengths(prior, context),
        tables,
        padded_tokens=tokens,
        contexts_on_device=True,
    )


def _prefill(given: UsualInputs, tokens: int, groups: AtomGroups) -> Step | None:
    """At least one token a row, by lengths that are on the host and on the device, and the host's offsets."""
    _, new, new_there, prior, prior_there, start, _ = given.lengths
    rows = new.numel()
    if not rows == new_there.numel() == prior.numel() == prior_there.numel() == start.numel() - 1:
        return None
    new, prior, start = _on_host(new), _on_host(prior), _on_host(start)
    if (
        new is None
        or prior is None
        or start is None
        or start.item(0)
        or start.item(-1) != tokens
        or (start[1:] - start[:-1]).tobytes() != new.tobytes()
        or new.min() <= 0
    ):
        return None
    tables, lengths = _tables(given, groups), (Lengths(new, new_there), Lengths(prior, prior_there))
    if tables is None:
        return None
    chunks = conv_list_size(num_chunks(new)) if groups.state_groups else 0
    return Step(Phase.PREFILL, *lengths, tables, padded_tokens=tokens, padded_chunks=chunks)


def _on_host(tensor: torch.Tensor) -> Numbers | None:
    """A tensor [n] int32 of the host's as an array."""
    return tensor.numpy() if tensor.is_cpu and tensor.dtype == torch.int32 and tensor.dim() == 1 else None


def _tables(given: UsualInputs, groups: AtomGroups) -> BlockTables | None:
    """The tables of `AtomGroups.planned`. None for those that are not read as they are."""
    tables = given.tables
    if has_none(tables) or not all(
        table.dtype == torch.int32 and table.dim() == 2 and table.is_contiguous() for table in tables
    ):
        return None
    return BlockTables([BlockTable(source.group, tables[source.table]) for source in groups.planned])


def _values(plan: Plan) -> tuple[Tensors, Tensors, Tensors]:
    """Slots, and states to read and to write, of each group of a plan."""
    slots: list[torch.Tensor | None] = []
    read: list[torch.Tensor | None] = []
    write: list[torch.Tensor | None] = []
    for group in plan.groups:
        if isinstance(group, StatePlan):
            slots.append(None)
            read.append(group.state_read)
            write.append(group.state_write)
        else:
            slots.append(group.slot)
            read.append(None)
            write.append(None)
    return tuple(slots), tuple(read), tuple(write)


@lru_cache(maxsize=1024)
def _ones(rows: int, device: torch.device) -> Lengths:
    """One new token for each row; nobody writes to it."""
    return Lengths(np.ones(rows, dtype=np.int32), torch.ones(rows, dtype=torch.int32, device=device))
