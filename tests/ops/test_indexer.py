"""The indexer: scores, causality by row, and a choice that ties and company do not change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops.indexer import choose_tokens, index_scores, stable_top_k
from stepbind.ops.reference_latent import choose_tokens_reference
from stepbind.plan import PagedPlan, Plan, build_plan, make_arena
from stepbind.step import Phase, make_step
from tests.ops.latent_case import LatentCase, latent_case

cases = st.integers(0, 2**32).map(latent_case)


def chosen_by(case: LatentCase, top_k: int | None = None) -> list[list[int]]:
    chosen = choose_tokens(
        case.index_query,
        case.index_weight,
        case.index_key,
        top_k or case.top_k,
        case.group_plan,
        case.plan.shared,
        case.plan.sizes,
    )
    assert chosen.dtype == torch.int32
    rows = chosen.tolist()
    for row in rows:
        kept = [p for p in row if p >= 0]
        assert row == sorted(kept) + [-1] * (len(row) - len(kept))
    return [[p for p in row if p >= 0] for row in rows]


@given(cases)
def test_the_choice_equals_the_reference(case: LatentCase) -> None:
    expected = choose_tokens_reference(
        case.index_query, case.index_weight, case.index_key, case.top_k, case.group_plan, case.plan.shared
    )
    assert chosen_by(case) == expected


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in map(latent_case, range(1000)) if c.plan.sizes.max_query > 8 and c.top_k == 5)
    whole = chosen_by(case)
    monkeypatch.setattr("stepbind.ops.indexer.MAX_HEAD_SCORES", 1)
    assert chosen_by(case) == whole


def test_scores_are_weighted_sums_of_positive_products() -> None:
    query = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]]])  # [1, 1, 3 heads, 2]
    weight = torch.tensor([[[2.0, -1.0, 0.5]]])
    key = torch.tensor([[[3.0, 4.0], [-3.0, 4.0], [3.0, -4.0], [0.0, 0.0]]])
    # 2*3 - 1*4 + 0;  0 - 1*4 + 0.5*3;  2*3 + 0 + 0;  nothing
    assert index_scores(query, weight, key).tolist() == [[[2.0, -2.5, 6.0, 0.0]]]


@pytest.mark.parametrize(
    ("dim", "heads", "context"), [(16, 1, 37), (24, 64, 5), (64, 1, 33), (64, 16, 5), (24, 7, 100)]
)
def test_equal_keys_score_equal_whatever_the_shape(dim: int, heads: int, context: int) -> None:
    """A float32 matrix product does not give equal columns equal results in these shapes."""
    torch.manual_seed(0)
    query, weight, key = torch.randn(1, 3, heads, dim), torch.randn(1, 3, heads), torch.randn(dim)
    scores = index_scores(query, weight, key.expand(1, context, dim).contiguous())
    assert torch.equal(scores, scores[..., :1].expand_as(scores))


def one_row(prior: int, query: int, *, before: int = 0) -> Plan:
    """A plan with a row of `prior` + `query` tokens, and in front of it one of `before` new ones where that is any."""
    context = prior + query
    columns = -(-max(context, before) // 4)
    lengths = ([before] if before else []) + [query], ([0] if before else []) + [prior]
    rows = len(lengths[0])
    group = CacheGroup("latent", GroupKind.LATENT, (0,), 4, 4, num_blocks=2 * columns + 1)
    # The row's own blocks are the first ones in either case.
    table = torch.arange(1, 2 * columns + 1, dtype=torch.int32).reshape(2, columns).flip(0)[2 - rows :]
    step = make_step([group], Phase.PREFILL, *lengths, {"latent": table})
    return build_plan(step, make_arena([group], max_rows=2, max_tokens=64, max_context=4 * columns))


def choose(plan: Plan, query: torch.Tensor, weight: torch.Tensor, key: torch.Tensor, top_k: int) -> list[list[int]]:
    group_plan = plan.groups[0]
    assert isinstance(group_plan, PagedPlan)
    chosen = choose_tokens(query, weight, key, top_k, group_plan, plan.shared, plan.sizes)
    return [[p for p in row if p >= 0] for row in chosen.tolist()]


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [
        (2, [[1, 4], [1, 4], [4, 6]]),  # smaller than the context
        (5, [[0, 1, 2, 3, 4], [0, 1, 2, 4, 5], [0, 1, 2, 4, 6]]),  # equal for the first token
        (7, [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]]),  # equal for the last
        (100, [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]]),  # larger
    ],
)
def test_k_smaller_than_equal_to_and_larger_than_the_context(top_k: int, expected: list[list[int]]) -> None:
    plan = one_row(prior=4, query=3)  # blocks 1 and 2 of four tokens
    key = torch.full((5, 4, 1), torch.nan)
    key[1:3].view(-1)[:7] = torch.tensor([3.0, 8.0, 5.0, 1.0, 9.0, 2.0, 10.0])
    assert choose(plan, torch.ones(3, 1, 1), torch.ones(3, 1), key, top_k) == expected


def test_equal_scores_take_the_earliest_whatever_else_is_in_the_batch() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(3, 24)  # three different keys that repeat, so that ties are exact only in exact arithmetic
    pattern = torch.randint(0, 3, (37,))
    query, weight = torch.randn(1, 7, 24), torch.randn(1, 7)
    scores = index_scores(query[None], weight[None], vectors[None])[0, 0]
    ranked = sorted(range(37), key=lambda p: (-float(scores[pattern[p]]), p))
    for before in (0, 1, 17, 60):
        plan = one_row(prior=36, query=1, before=before)
        group_plan = plan.groups[0]
        assert isinstance(group_plan, PagedPlan)
        key = torch.full((group_plan.group.num_kernel_blocks, 4, 24), torch.nan)
        row_blocks = group_plan.block_table[-1][group_plan.block_table[-1] >= 0].long()
        key[row_blocks] = torch.nn.functional.pad(vectors[pattern], (0, 0, 0, 3)).reshape(-1, 4, 24)
        if before:
            own = group_plan.block_table[0][group_plan.block_table[0] >= 0].long()
            key[own] = torch.randn(len(own), 4, 24)
        company = torch.randn(before, 7, 24), torch.randn(before, 7)
        for top_k in (1, 5, 16, 30):
            chosen = choose(plan, torch.cat([company[0], query]), torch.cat([company[1], weight]), key, top_k)
            assert chosen[-1] == sorted(ranked[:top_k])


@given(cases, st.integers(0, 2**32))
def test_a_choice_depends_on_its_own_row_up_to_itself_alone(case: LatentCase, seed: int) -> None:
    before = chosen_by(case)
    shared, plan = case.plan.shared, case.group_plan
    for row in range(case.plan.sizes.num_rows):
        start, stop = int(shared.query_start[row]), int(shared.query_start[row + 1])
        if start == stop:
            continue
        token = start + seed % (stop - start)
        seen = int(shared.prior_len[row]) + token - start + 1
        size = plan.group.kernel_block_size
        others = torch.ones(case.index_key.shape[:2], dtype=torch.bool)
        for p in range(seen):
            others[plan.block_table[row, p // size], p % size] = False
        key = torch.where(others[..., None], torch.full_like(case.index_key, 1e6), case.index_key)
        assert (
            chosen_by(dataclasses.replace(case, pages=dataclasses.replace(case.pages, index_key=key)))[token]
            == (before[token])
        )


@given(st.lists(st.sampled_from([-1.0, 0.0, -0.0, 0.5, 2.0]), min_size=1, max_size=12), st.data())
def test_the_best_k_are_those_of_a_stable_sort(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    allowed = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    candidates = [p for p in range(len(values)) if allowed[p]]
    expected = sorted(sorted(candidates, key=lambda p: -values[p])[:k])
    out = stable_top_k(torch.tensor([values]), torch.tensor([allowed]), k)[0].tolist()
    assert out == expected + [-1] * (k - len(expected))
