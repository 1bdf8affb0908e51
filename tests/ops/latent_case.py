"""Random steps of one latent group with pages to run them on: memory that nobody owns is NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from stepbind.caches import LatentPages
from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops.cache_write import write_latent, write_tokens
from stepbind.plan import PagedPlan, Plan, build_plan, make_arena
from stepbind.step import Granularity, Phase, make_step

HEADS, NOPE_DIM, ROTARY_DIM, VALUE_DIM, RANK, INDEX_DIM = 3, 4, 2, 5, 6, 4


@dataclass(frozen=True, eq=False)
class LatentCase:
    """A step whose context is in its pages, new tokens included."""

    plan: Plan
    pages: LatentPages
    query: torch.Tensor  # [T, heads, nope dim + rotary dim]
    weight: torch.Tensor  # [heads, nope dim + value dim, rank]
    index_query: torch.Tensor  # [T, heads, index dim], small integers, so that scores are exact and often equal
    index_weight: torch.Tensor  # [T, heads], integers
    top_k: int

    @property
    def group_plan(self) -> PagedPlan:
        plan = self.plan.groups[0]
        assert isinstance(plan, PagedPlan)
        return plan

    @property
    def index_key(self) -> torch.Tensor:
        assert self.pages.index_key is not None
        return self.pages.index_key


def latent_case(seed: int, *, holes: bool = True) -> LatentCase:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kernel, ratio, rows = rng.choice((1, 2, 3, 4, 16)), rng.choice((1, 1, 2, 4)), rng.randint(1, 4)
    phase = rng.choice(list(Phase))
    dummy = rng.random() < 0.05
    query_len, prior_len = [0] * rows, [0] * rows
    if not dummy:
        longest = 1 if phase is Phase.DECODE else 12
        query_len = [rng.randint(1, longest) for _ in range(rows)]
        prior_len = [rng.choice((0, rng.randrange(40))) for _ in range(rows)]
    context = max(q + n for q, n in zip(query_len, prior_len, strict=True))
    columns = max(1, -(-context // (kernel * ratio)) + rng.randrange(2))
    group = CacheGroup("latent", GroupKind.LATENT, (0,), kernel * ratio, kernel, num_blocks=rows * columns + 4)
    blocks = rng.sample(range(1, group.num_blocks), rows * columns)
    table = torch.tensor(blocks, dtype=torch.int32).reshape(rows, columns)
    granularity = rng.choice(list(Granularity))
    if granularity is Granularity.KERNEL:
        table = (table[..., None] * ratio + torch.arange(ratio, dtype=torch.int32)).flatten(1)
    if holes and rng.random() < 0.3:
        table[rng.randrange(rows), rng.randrange(table.shape[1])] = rng.choice((-1, 0, 2**31 - 1))
    tokens = sum(query_len) + rng.choice((0, 0, 1, 5))
    step = make_step(
        [group],
        phase,
        query_len,
        prior_len,
        {"latent": table},
        granularity=granularity,
        padded_rows=rows + rng.choice((0, 0, 2)),
        padded_tokens=max(tokens, 1),
    )
    arena = make_arena([group], max_rows=step.padded_rows, max_tokens=step.padded_tokens, max_context=max(context, 1))
    plan = build_plan(step, arena, strict=False)
    pages = nan_pages(group)
    case = LatentCase(
        plan=plan,
        pages=pages,
        query=torch.randn(step.padded_tokens, HEADS, NOPE_DIM + ROTARY_DIM),
        weight=torch.randn(HEADS, NOPE_DIM + VALUE_DIM, RANK),
        index_query=small_integers(step.padded_tokens, HEADS, INDEX_DIM),
        index_weight=small_integers(step.padded_tokens, HEADS),
        top_k=rng.choice((1, 2, 5, 16, 64)),
    )
    fill_context(case)
    return case


def nan_pages(group: CacheGroup) -> LatentPages:
    shape = (group.num_kernel_blocks, group.kernel_block_size)
    return LatentPages(torch.full((*shape, RANK + ROTARY_DIM), torch.nan), torch.full((*shape, INDEX_DIM), torch.nan))


def small_integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).float()


def fill_context(case: LatentCase) -> None:
    """Store random entries of every row's context at its slots, as all passes up to this one would have."""
    table, size = case.group_plan.block_table, case.group_plan.group.kernel_block_size
    for row in range(table.shape[0]):
        position = torch.arange(int(case.plan.shared.context_len[row]))
        if not len(position):
            continue
        block = table[row, position // size].long()
        slot = torch.where(block >= 0, block * size + position % size, -1)
        write_latent(case.pages, torch.randn(len(slot), RANK), torch.randn(len(slot), ROTARY_DIM), slot)
        write_tokens(case.index_key, small_integers(len(slot), INDEX_DIM), slot)
