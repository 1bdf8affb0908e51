"""Random steps for the GPU's latent attention and indexer, and what each must hold, as `op_checks` for the other ops.

Memory that a step may not read holds NaN: unowned pages, what is behind a context, and, for sparse attention, all that
was not chosen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from stepbind.caches import LatentPages
from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops import triton_cache_write, triton_indexer, triton_latent_attention, triton_top_k
from stepbind.ops.indexer import stable_top_k
from stepbind.ops.reference_latent import choose_tokens_reference, latent_attention_reference, own_position
from stepbind.plan import PagedPlan, Plan, build_plan, make_arena
from stepbind.step import Phase, make_step
from tests.op_checks import Shape, assert_close, moved, nan, normal, random_plan
from tests.ops.latent_case import small_integers


@dataclass(frozen=True)
class LatentShape(Shape):
    """What a check runs at: `Shape`'s dtype, page, lengths, and the sizes of one latent layer."""

    longest: int = 6
    heads: int = 3
    nope_dim: int = 8
    rotary_dim: int = 6
    value_dim: int = 5
    rank: int = 24
    index_heads: int = 3
    index_dim: int = 8

    @property
    def elements(self) -> int:
        return self.rank + self.rotary_dim


def latent_plan(rng: random.Random, phase: Phase, shape: LatentShape) -> tuple[Plan, PagedPlan]:
    plan = random_plan(rng, GroupKind.LATENT, phase, shape)
    group = plan.groups[0]
    assert isinstance(group, PagedPlan)
    return plan, group


def written_pages(plan: Plan, group: PagedPlan, entries: torch.Tensor, *, new_tokens: bool) -> torch.Tensor:
    """Pages [kernel blocks, page, elements] with one of entries [slots, elements] for each position of each context, or
    for each that was there before the step; NaN elsewhere."""
    page = group.group.kernel_block_size
    pages = nan(group.group.num_kernel_blocks, page, entries.shape[1], dtype=entries.dtype)
    lengths = plan.shared.context_len if new_tokens else plan.shared.prior_len
    for row, length in enumerate(lengths.tolist()):
        for position in range(length):
            block = int(group.block_table[row, position // page])
            if block >= 0:
                pages[block, position % page] = entries[block * page + position % page]
    return pages


def slots_in(group: PagedPlan) -> int:
    return group.group.num_kernel_blocks * group.group.kernel_block_size


def check_writes(seed: int, phase: Phase, shape: LatentShape, device: str) -> None:
    """Latents, and index keys, at the slots and nowhere else."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plan, group = latent_plan(rng, phase, shape)
    pages = nan(group.group.num_kernel_blocks, shape.page, shape.elements, dtype=shape.dtype)
    # Parts of wider projections, as a model hands them over.
    latent = normal(plan.sizes.padded_tokens, shape.rank + 3, dtype=shape.dtype)[:, : shape.rank]
    rotary = normal(plan.sizes.padded_tokens, shape.rotary_dim + 3, dtype=shape.dtype)[:, 3:]
    for second in (rotary, None):
        there, parts = pages.to(device, copy=True), (latent, rotary) if second is not None else (latent,)
        want = pages.clone()
        for token, slot in enumerate(group.slot.tolist()):
            if slot >= 0:
                joined = torch.cat([part[token] for part in parts])
                want[slot // shape.page, slot % shape.page, : len(joined)] = joined
        on_device = [part.to(device) for part in parts]
        triton_cache_write.write_tokens(there, on_device[0], (*on_device, None)[1], group.slot.to(device))
        torch.testing.assert_close(there.cpu(), want, atol=0, rtol=0, equal_nan=True)


def check_latent_attention(seed: int, phase: Phase, shape: LatentShape, device: str) -> None:
    """Dense, and over random choices."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plan, group = latent_plan(rng, phase, shape)
    pages = written_pages(plan, group, normal(slots_in(group), shape.elements, dtype=shape.dtype), new_tokens=True)
    tokens, there = plan.sizes.padded_tokens, moved(plan, device)
    query = normal(tokens, shape.heads, shape.nope_dim + shape.rotary_dim, dtype=shape.dtype)
    # Drawn so that absorbed queries and values are about 1 too.
    weight = torch.randn(shape.heads, shape.nope_dim + shape.value_dim, shape.rank) * shape.rank**-0.5
    weight = weight.to(shape.dtype)
    scale = (shape.nope_dim + shape.rotary_dim) ** -0.5
    exact, on_device = (query.float(), weight.float()), (query.to(device), weight.to(device))

    cache = LatentPages(pages.to(device))
    out = triton_latent_attention.latent_attention(*on_device, cache, there.groups[0], there.shared, there.sizes, scale)
    want = latent_attention_reference(*exact, LatentPages(pages.float()), group, plan.shared, scale)
    assert_close(out, want, shape.dtype)
    assert bool((out[int(plan.shared.query_start[-1]) :] == 0).all())

    chosen, read = random_choice(rng, plan, group)
    sparse = pages.masked_fill(~read[..., None], torch.nan)
    cache = LatentPages(sparse.to(device))
    out = triton_latent_attention.sparse_latent_attention(
        *on_device, cache, chosen.to(device), there.groups[0], there.shared, scale
    )
    positions = [[p for p in row if p >= 0] for row in chosen.tolist()]
    want = latent_attention_reference(*exact, LatentPages(sparse.float()), group, plan.shared, scale, positions)
    assert_close(out, want, shape.dtype)


def random_choice(rng: random.Random, plan: Plan, group: PagedPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of each token's context [T, K] int32, ascending, -1 behind, now and then nothing; and which entries of the
    pages [kernel blocks, page] anyone chose."""
    width, page = rng.choice((1, 5, 16, 40)), group.group.kernel_block_size
    chosen = torch.full((plan.sizes.padded_tokens, width), -1, dtype=torch.int32)
    read = torch.zeros(group.group.num_kernel_blocks, page, dtype=torch.bool)
    for token, row in enumerate(plan.shared.row_of_token.tolist()):
        length = own_position(plan.shared, token) + 1
        picked = sorted(rng.sample(range(length), min(rng.choice((0, width, rng.randint(0, width))), length)))
        chosen[token, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
        for position in picked:
            block = int(group.block_table[row, position // page])
            if block >= 0:
                read[block, position % page] = True
    return chosen, read


def check_indexer(seed: int, phase: Phase, shape: LatentShape, device: str) -> None:
    """Choices equal the reference's, position for position. Small integers: scores are exact and often equal."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plan, group = latent_plan(rng, phase, shape)
    keys = written_pages(plan, group, small_integers(slots_in(group), shape.index_dim), new_tokens=True)
    query = small_integers(plan.sizes.padded_tokens, shape.index_heads, shape.index_dim)
    weight = small_integers(plan.sizes.padded_tokens, shape.index_heads)
    top_k, there = rng.choice((1, 2, 5, 16, 64)), moved(plan, device)
    chosen = triton_indexer.choose_tokens(
        query.to(device, shape.dtype),
        weight.to(device),
        keys.to(device, shape.dtype),
        top_k,
        there.groups[0],
        there.shared,
        there.sizes,
    )
    want = choose_tokens_reference(query, weight, keys, top_k, group, plan.shared)
    assert chosen.tolist() == [row + [-1] * (chosen.shape[1] - len(row)) for row in want]


def check_equal_keys_score_equal(seed: int, phase: Phase, shape: LatentShape, device: str) -> None:
    """Scores of keys that are all the same, wherever they stand and in whatever step, equal those of a step alone."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    key = normal(1, shape.index_dim, dtype=shape.dtype)
    query = normal(1, shape.index_heads, shape.index_dim, dtype=shape.dtype)
    weight = torch.randn(1, shape.index_heads)
    seen = set()
    for _ in range(3):
        plan, group = latent_plan(rng, phase, shape)
        keys = written_pages(plan, group, key.expand(slots_in(group), -1), new_tokens=True)
        tokens, there = plan.sizes.padded_tokens, moved(plan, device)
        scores = torch.full((tokens, 4 * shape.page * 4 + 64), torch.nan, device=device)
        triton_indexer.index_scores(
            scores,
            query.expand(tokens, -1, -1).to(device),
            weight.expand(tokens, -1).to(device),
            keys.to(device),
            0,
            plan.sizes.max_context,
            there.groups[0],
            there.shared,
            there.sizes,
        )
        for token in range(tokens):
            own = scores[token, : own_position(plan.shared, token) + 1]
            seen |= set(own[own > -torch.inf].tolist())
            assert not own.isnan().any()
    assert len(seen) <= 1


def check_top_k(values: list[float], allowed: list[bool], k: int, device: str) -> None:
    """The choice of a single token at the end of a row of these scores, of which some are no candidates."""
    tokens = len(values)
    plan = whole_row(tokens)
    scores = torch.tensor(values).masked_fill(~torch.tensor(allowed), -torch.inf)
    there = torch.full((1, tokens + 3), torch.nan)
    there[0, :tokens] = scores
    chosen = torch.full((1, k), 77, dtype=torch.int32, device=device)
    triton_top_k.best_positions(chosen, there.to(device), tokens - 1, tokens, moved(plan.shared, device))
    want = stable_top_k(torch.tensor(values), torch.tensor(allowed), min(k, tokens)).tolist()
    assert chosen[0].tolist() == want + [-1] * (k - len(want))


def whole_row(tokens: int) -> Plan:
    """A plan of one row of so many new tokens."""
    group = CacheGroup("latent", GroupKind.LATENT, (0,), 16, 16, num_blocks=-(-tokens // 16) + 1)
    table = torch.arange(1, group.num_blocks, dtype=torch.int32)[None]
    step = make_step([group], Phase.PREFILL, [tokens], [0], {"latent": table})
    arena = make_arena([group], max_rows=1, max_tokens=tokens, max_context=tokens)
    return build_plan(step, arena, triton=False)


def check_garbage_touches_nothing_outside(seed: int, phase: Phase, shape: LatentShape, device: str) -> None:
    """Tables, slots and choices of arbitrary numbers: nothing outside of the pages is written, and what comes out is
    made of what stands in them."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plan, group = latent_plan(rng, phase, shape)
    tokens, blocks = plan.sizes.padded_tokens, group.group.num_kernel_blocks
    table, slot, chosen = group.block_table.clone(), group.slot.clone(), random_choice(rng, plan, group)[0]
    for values, limit in ((table, blocks), (slot, slots_in(group)), (chosen, 200)):
        rubbish = torch.randint(-3, 2 * limit, values.shape).to(values.dtype)
        rubbish = torch.where(torch.rand(values.shape) < 0.2, torch.iinfo(torch.int32).max, rubbish)
        values.copy_(rubbish)
    group = replace(group, block_table=table, slot=slot)
    there: PagedPlan = moved(group, device)
    shared, sizes = moved(plan.shared, device), plan.sizes

    def guarded(elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of ones in the middle of a buffer of NaN."""
        buffer = nan(3 * blocks, shape.page, elements, dtype=shape.dtype).to(device)
        pages = buffer[blocks : 2 * blocks]
        return pages.fill_(1), buffer

    latent, latent_buffer = guarded(shape.elements)
    keys, key_buffer = guarded(shape.index_dim)

    def ones(*sizes: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.ones(sizes, dtype=dtype, device=device)

    triton_cache_write.write_tokens(latent, ones(tokens, shape.rank), ones(tokens, shape.rotary_dim), there.slot)
    triton_cache_write.write_tokens(keys, ones(tokens, shape.index_dim), None, there.slot)
    for pages, buffer in ((latent, latent_buffer), (keys, key_buffer)):
        assert bool((pages == 1).all())
        assert bool(buffer[:blocks].isnan().all() & buffer[2 * blocks :].isnan().all())
    query = ones(tokens, shape.heads, shape.nope_dim + shape.rotary_dim)
    weight = ones(shape.heads, shape.nope_dim + shape.value_dim, shape.rank)
    inputs = query, weight, LatentPages(latent)
    index_query = ones(tokens, shape.index_heads, shape.index_dim)
    index_weight = ones(tokens, shape.index_heads, dtype=torch.float32)
    best = triton_indexer.choose_tokens(index_query, index_weight, keys, 16, there, shared, sizes)
    assert bool((best < max(1, sizes.max_context)).all() & (best >= -1).all())
    for out in (
        triton_latent_attention.latent_attention(*inputs, there, shared, sizes, 0.1),
        triton_latent_attention.sparse_latent_attention(*inputs, best, there, shared, 0.1),
        triton_latent_attention.sparse_latent_attention(*inputs, chosen.to(device), there, shared, 0.1),
    ):
        # Latents of ones give values of `rank`; a token without any gives zeros.
        assert bool((((out - shape.rank).abs() < 0.1) | (out == 0)).all())
