"""Random steps: any phase, lengths around every kind of boundary, groups that share nothing, holes and padding."""

from __future__ import annotations

import dataclasses
import random

import torch
from hypothesis import strategies as st

from stepbind.groups import CacheGroup, GroupKind
from stepbind.step import Granularity, Phase, Step, make_step

BLOCK_SIZES = (1, 2, 3, 5, 8, 16, 48, 64)
RATIOS = (1, 1, 2, 3, 4, 16, 64)


def random_groups(rng: random.Random, count: int) -> list[CacheGroup]:
    """Half the time all block sizes are powers of two, which the fill kernels treat in a way of their own."""
    powers, groups = rng.random() < 0.5, []
    sizes, ratios = [[n for n in of if not powers or n & (n - 1) == 0] for of in (BLOCK_SIZES, RATIOS)]
    for index in range(count):
        kernel, ratio = rng.choice(sizes), rng.choice(ratios)
        groups.append(
            CacheGroup(
                name=f"group{index}",
                kind=rng.choice(list(GroupKind)),
                layers=(3 * index, 3 * index + 1),
                block_size=kernel * ratio,
                kernel_block_size=kernel,
                num_blocks=rng.choice((4, 50, 100_000, 2**31 // ratio - 1)),
                first_block=rng.choice((0, 1, 1, 2)),
            )
        )
    return groups


def random_table(
    rng: random.Random, group: CacheGroup, rows: int, entries: int, granularity: Granularity, holes: bool
) -> torch.Tensor:
    """Mostly good ids, and with `holes` some that are -1, reserved, or far out of range."""
    ratio = group.ratio if granularity is Granularity.KERNEL else 1
    bad = (-1, 0, -7, group.num_blocks, group.num_blocks + 3, 2**31 - 1)

    def physical() -> int:
        if holes and rng.random() < 0.1:
            return rng.choice(bad)
        return rng.randrange(group.first_block, group.num_blocks)

    table = []
    for _ in range(rows):
        ids: list[int] = []
        while len(ids) < entries:
            block = physical()
            ids += [min(block * ratio + i, 2**31 - 1) if block > 0 else block for i in range(ratio)]
        table.append(ids[:entries])
    return torch.tensor(table, dtype=torch.int32)


def random_length(rng: random.Random, groups: list[CacheGroup], limit: int) -> int:
    """A length up to `limit`, often right at, before or after a block boundary of some group."""
    if rng.random() < 0.5:
        return rng.randrange(limit + 1)
    size = rng.choice(groups).block_size
    return max(0, min(limit, size * rng.randrange(4) + rng.choice((-1, 0, 1))))


def random_step(seed: int, *, holes: bool = True) -> Step:
    rng = random.Random(seed)
    groups = random_groups(rng, rng.randint(1, 6))
    phase = rng.choice(list(Phase))
    rows = rng.choice((1, 2, 3, rng.randint(1, 64)))
    limit = rng.choice((4, 40, 300))
    dummy = rng.random() < 0.05
    if dummy:
        query = prior = [0] * rows
    else:
        prior = [random_length(rng, groups, limit) for _ in range(rows)]
        longest = {Phase.DECODE: 1, Phase.VERIFY: 6, Phase.PREFILL: max(1, limit * 4 // rows)}[phase]
        query = [max(1, random_length(rng, groups, longest)) for _ in range(rows)]
    padded_rows = rows + rng.choice((0, 0, 1, 7))
    tokens = sum(query)
    padded_tokens = max(tokens + rng.choice((0, 0, 1, 13)), 1)

    tables, granularity = {}, {}
    for group in groups:
        grain = rng.choice(list(Granularity))
        size = group.block_size if grain is Granularity.PHYSICAL else group.kernel_block_size
        # One state block a drafted token is the widest any phase asks for.
        entries = max(max(n + q for n, q in zip(prior, query, strict=True)), 1)
        columns = -(-entries // size) + (max(query) + 1) * (group.block_size // size)
        height = rng.choice((rows, padded_rows))
        tables[group.name] = random_table(rng, group, height, columns, grain, holes)
        granularity[group.name] = grain
    position = None
    if rng.random() < 0.3 and tokens:
        position = torch.tensor([rng.randrange(10_000) for _ in range(tokens)], dtype=torch.int64)
    padded_chunks = 0 if phase is Phase.DECODE else rng.choice((0, 0, 5, 300))
    return make_step(
        groups,
        phase,
        query,
        prior,
        tables,
        granularity=granularity,
        position=position,
        padded_rows=padded_rows,
        padded_tokens=padded_tokens,
        padded_chunks=padded_chunks,
    )


def bounded_step(seed: int) -> Step:
    """A decode or verify step whose host lengths are bounds: some rows are padding, and all contexts are shorter."""
    rng = random.Random(seed)
    while (step := random_step(rng.randrange(2**32))).is_dummy or step.phase is Phase.PREFILL:
        pass
    live = torch.tensor([rng.random() < 0.7 for _ in range(step.num_rows)], dtype=torch.int32)
    query = torch.from_numpy(step.query_len.host.copy()) * live
    prior = torch.tensor([rng.randint(0, bound) for bound in step.prior_len.host.tolist()], dtype=torch.int32) * live
    return dataclasses.replace(
        step,
        query_len=dataclasses.replace(step.query_len, device=query),
        prior_len=dataclasses.replace(step.prior_len, device=prior),
        lengths_are_bounds=True,
    )


def steps(*, holes: bool = True) -> st.SearchStrategy[Step]:
    """Hypothesis shrinks the seed; the step of a seed is always the same."""
    return st.integers(0, 2**32).map(lambda seed: random_step(seed, holes=holes))
