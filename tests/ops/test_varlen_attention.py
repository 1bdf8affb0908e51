"""Which passes the library's attention gets, what it is handed, and that nothing else changes with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepbind.caches import KVPages
from stepbind.context import Context, bound
from stepbind.models import attention
from stepbind.ops import varlen_attention
from stepbind.ops.varlen_attention import FASTER_FROM, serves, unsupported
from stepbind.plan import Plan, Sizes
from stepbind.step import Phase, make_step
from tests.op_checks import Shape, assert_close
from tests.varlen_checks import Pass, check_varlen_attention, random_pass, varlen_attn

HALF = Shape(dtype=torch.float16)
seeds = st.integers(0, 2**32)


@pytest.fixture
def stand_in() -> Iterator[None]:
    """The library runs here, and is faster from 2 tokens on."""
    with (
        patch.object(varlen_attention, "varlen_function", lambda: varlen_attn),
        patch.object(varlen_attention, "unsupported", lambda device: None),
        patch.dict(FASTER_FROM, {HALF.head_dim: 2}, clear=True),
    ):
        yield


@pytest.mark.usefixtures("stand_in")
@settings(max_examples=30)
@given(seeds, st.sampled_from((torch.float32, torch.float16)))
def test_it_equals_paged_attention(seed: int, dtype: torch.dtype) -> None:
    check_varlen_attention(seed, dataclasses.replace(HALF, dtype=dtype), "cpu")


def sizes_of(query: list[int], prior: list[int], phase: Phase = Phase.PREFILL, **padding: int) -> Sizes:
    group = random_pass(0, HALF).plan.groups[0].group
    table = torch.ones(len(query), 40, dtype=torch.int32)
    return Sizes.of(make_step([group], phase, query, prior, {"group": table}, **padding))


def chosen(sizes: Sizes, dtype: torch.dtype = torch.float16, pages: torch.dtype = torch.float16, dim: int = 24) -> bool:
    query, key, block = torch.empty(9, 6, dim), torch.empty(9, 2, dim), torch.empty(1, 2, 16, dim, dtype=pages)
    return serves(query.to(dtype), key.to(dtype), key.to(dtype), KVPages(block, block), sizes)


@pytest.mark.usefixtures("stand_in")
def test_it_gets_prefills_without_prior_context_whose_keys_the_pages_hold_unchanged() -> None:
    fresh = sizes_of([4, 5], [0, 0])
    assert chosen(fresh)
    assert chosen(sizes_of([4, 5], [0, 0], padded_rows=4))
    assert chosen(fresh, torch.bfloat16, torch.bfloat16)
    assert not chosen(sizes_of([4, 5], [0, 16]))
    assert not chosen(sizes_of([4, 5], [1, 0]))  # not the longest row, context and all
    assert not chosen(sizes_of([4, 5], [0, 0], padded_tokens=10))
    assert not chosen(sizes_of([1, 1], [0, 0], Phase.DECODE))
    assert not chosen(sizes_of([4, 4], [0, 0], Phase.VERIFY))
    assert not chosen(sizes_of([0, 0], [0, 0]))
    assert not chosen(sizes_of([1, 1], [0, 0]))  # shorter than where it is faster
    assert not chosen(fresh, torch.float16, torch.float32)
    assert not chosen(fresh, torch.float32, torch.float32)
    assert not chosen(fresh, dim=32)  # not measured


@pytest.mark.usefixtures("stand_in")
def test_it_wants_heads_whose_elements_lie_next_to_each_other() -> None:
    sizes, block = sizes_of([4, 5], [0, 0]), torch.empty(1, 2, 16, 24, dtype=torch.float16)
    query, key = torch.empty(9, 6, 24, dtype=torch.float16), torch.empty(9, 24, 2, dtype=torch.float16).mT
    assert not serves(query, key, key, KVPages(block, block), sizes)


def test_it_is_never_asked_for_on_the_cpu() -> None:
    with patch.dict(FASTER_FROM, {HALF.head_dim: 1}, clear=True):
        assert not chosen(sizes_of([4, 5], [0, 0]))


def test_it_stays_with_ours_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "unsupported", lambda device: None)
    with patch.dict(FASTER_FROM, clear=True):
        assert not chosen(sizes_of([4, 5], [0, 0]))


@pytest.mark.parametrize(
    ("hip", "flash", "capability", "why"),
    [
        (None, True, (9, 0), None),
        ("7.0", True, (9, 4), "it was not measured on AMD"),
        (None, False, (9, 0), "this torch was built without Flash Attention"),
        (None, True, (7, 5), "Flash Attention needs compute capability 8.0"),
    ],
)
def test_what_a_gpu_and_a_torch_must_have(
    hip: str | None, flash: bool, capability: tuple[int, int], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert unsupported.__wrapped__(torch.device("cuda")) == why


def test_torchs_function_is_asked_to_group_heads_where_it_wants_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_torch_2_11(query: Any, **options: Any) -> dict[str, Any]:
        return options

    def of_torch_2_13(query: Any, *, enable_gqa: bool = False) -> dict[str, Any]:
        return {"enable_gqa": enable_gqa}

    for function, want in ((of_torch_2_11, {}), (of_torch_2_13, {"enable_gqa": True})):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        assert varlen_attention.varlen_function.__wrapped__()(None) == want


def forward(given: Pass, plan: Plan, pages: KVPages) -> torch.Tensor:
    """The attention function that transformers calls."""
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    inputs = [each.transpose(0, 1)[None] for each in (given.query, given.key, given.value)]
    with bound(Context(plan, {0: pages})):  # type: ignore[arg-type]
        return attention.attention_forward(module, *inputs, None, given.scale)[0]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_a_layer_writes_the_same_pages_and_gives_the_same_output_with_it(
    seed: int, copies: int, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """copies: times that each KV head stands in the cache (tensor parallelism)."""
    given = random_pass(seed, HALF)
    pages = [KVPages(*(x.repeat_interleave(copies, dim=1) for x in vars(given.pages()).values())) for _ in range(2)]
    by_library = forward(given, given.plan, pages[0])
    with patch.dict(FASTER_FROM, clear=True):
        ours = forward(given, given.plan, pages[1])
    assert_close(by_library, ours, HALF.dtype)
    for got, want in zip(vars(pages[0]).values(), vars(pages[1]).values(), strict=True):
        torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)
    # And it was the library: without it, the layer has nothing to call.
    monkeypatch.setattr(varlen_attention, "varlen_function", lambda: None)
    if given.plan.sizes.max_query >= 2:
        with pytest.raises(TypeError, match="NoneType"):
            forward(given, given.plan, pages[0])


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("seed", range(5))
def test_a_bad_table_entry_costs_its_tokens_their_place_in_the_cache_and_nothing_else(seed: int) -> None:
    given = random_pass(seed, dataclasses.replace(HALF, longest=40))
    whole, holed = given.pages(), given.pages()
    assert given.plan.sizes.max_query >= 2
    want, got = forward(given, given.plan, whole), forward(given, given.bad, holed)
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    for have, full in zip(vars(holed).values(), vars(whole).values(), strict=True):
        missing = have.isnan() & ~full.isnan()
        assert missing.any()
        torch.testing.assert_close(have, full.masked_fill(missing, torch.nan), atol=0, rtol=0, equal_nan=True)
