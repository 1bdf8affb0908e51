"""Random small steps with caches behind them: what a step may read holds numbers, everything else NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from stepbind.caches import KVPages, StateSlots
from stepbind.groups import CacheGroup, GroupKind
from stepbind.plan import PagedPlan, Plan, StatePlan, build_plan, make_arena
from stepbind.step import Phase, make_step

KV_HEADS, HEADS_PER_KV, HEAD_DIM = 2, 3, 8
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 5
WIDTH, CHANNELS = 4, 7


@dataclass(frozen=True)
class Case:
    """A step's plan over one group, and the group's owned blocks by row."""

    plan: Plan
    group: PagedPlan | StatePlan
    owned: set[int]


def random_case(seed: int, kind: GroupKind, phase: Phase | None = None) -> Case:
    """Rows own distinct blocks, a few entries are missing, and there is padding."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kernel = rng.choice((1, 2, 4, 16)) if kind is GroupKind.STATE else rng.choice((2, 4, 16))
    ratio = 1 if kind is GroupKind.STATE else rng.choice((1, 2, 4))
    size = kernel * ratio
    phase = phase or rng.choice(list(Phase))
    rows = rng.randint(1, 5)
    prior = [rng.choice((0, rng.randrange(3 * size + 1), size, size - 1)) for _ in range(rows)]
    longest = {Phase.DECODE: 1, Phase.VERIFY: 4, Phase.PREFILL: rng.choice((3, 30, 150))}[phase]
    query = [rng.randint(1, longest) for _ in range(rows)]
    columns = max((n + q) // size + q * (phase is Phase.VERIFY) + 1 for n, q in zip(prior, query, strict=True))
    ids = list(range(1, rows * columns + 1))
    rng.shuffle(ids)
    group = CacheGroup("group", kind, (0,), size, kernel, num_blocks=len(ids) + 1)
    table = torch.tensor(ids, dtype=torch.int32).reshape(rows, columns)
    for _ in range(rng.choice((0, 0, 2))):
        table[rng.randrange(rows), rng.randrange(columns)] = rng.choice((-1, 0, len(ids) + 1, 2**31 - 1))
    step = make_step(
        [group],
        phase,
        query,
        prior,
        {"group": table},
        padded_rows=rows + rng.choice((0, 2)),
        padded_tokens=sum(query) + rng.choice((0, 3)),
    )
    arena = make_arena([group], max_rows=8, max_tokens=step.padded_tokens, max_context=step.max_context + size)
    plan = build_plan(step, arena, strict=False)
    return Case(plan, plan.groups[0], set(table.flatten().tolist()))


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def kv_cache(case: Case) -> KVPages:
    """Pages with numbers at the prior tokens' slots."""
    group, shared = case.group, case.plan.shared
    assert isinstance(group, PagedPlan)
    size = group.group.kernel_block_size
    buffer = nan(group.group.num_kernel_blocks, 2, KV_HEADS, size, HEAD_DIM)
    for row, prior in enumerate(shared.prior_len.tolist()):
        for position in range(prior):
            block = int(group.block_table[row, position // size])
            if block >= 0:
                buffer[block, :, :, position % size] = torch.randn(2, KV_HEADS, HEAD_DIM)
    return KVPages(buffer[:, 0], buffer[:, 1])


def state_cache(case: Case) -> StateSlots:
    """Slots with numbers where a row reads; states are strided apart, as in a host's blocks."""
    assert isinstance(case.group, StatePlan)
    blocks = case.group.group.num_blocks
    recurrent = nan(blocks, VALUE_HEADS, VALUE_DIM, KEY_DIM + 1)[..., :KEY_DIM]
    conv = nan(blocks, WIDTH + 1, CHANNELS)[:, : WIDTH - 1]
    for slot in case.group.state_read.tolist():
        if slot >= 0:
            recurrent[slot] = torch.randn(VALUE_HEADS, VALUE_DIM, KEY_DIM)
            conv[slot] = torch.randn(WIDTH - 1, CHANNELS)
    return StateSlots(recurrent, conv)


def assert_same(got: torch.Tensor, want: torch.Tensor, rounding: float = 2e-5) -> None:
    """Equal within rounding, NaN where NaN is."""
    torch.testing.assert_close(got, want, atol=rounding, rtol=rounding, equal_nan=True)
