"""What the reference bridge does for latent groups, case by case, with numbers computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepbind.bind import bind
from stepbind.caches import Caches, IndexSpec, KVSpec, LatentPages, LatentSpec, kv_pages, latent_pages
from stepbind.context import current
from stepbind.errors import NotBoundError, StepError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.layers import discover_layers, group_layers
from stepbind.plan import PagedPlan, build_plan, make_arena
from stepbind.step import Granularity, Phase, make_step
from stepbind.tiny import tiny_model

# Blocks of 8 tokens are 4 kernel blocks of 2: block 3 is kernel blocks 12..15, 5 is 20..23, 7 is 28..31.
GROUP = CacheGroup("latent", GroupKind.LATENT, (0,), block_size=8, kernel_block_size=2, num_blocks=9)
PHYSICAL = [[3, 5], [7, -1]]
KERNEL = [[12, 13, 14, 15, 20, 21, 22, 23], [28, 29, 30, 31, -1, -1, -1, -1]]


def plan_of(table: list[list[int]], granularity: Granularity, **options: Any) -> PagedPlan:
    """Rows of 16 and 7 tokens of context, 2 and 3 of them new."""
    blocks = torch.tensor(table, dtype=torch.int32)
    step = make_step([GROUP], Phase.PREFILL, [2, 3], [14, 4], {"latent": blocks}, granularity=granularity)
    arena = make_arena([GROUP], max_rows=2, max_tokens=8, max_context=16)
    plan = build_plan(step, arena, **options).groups[0]
    assert isinstance(plan, PagedPlan)
    return plan


def physical_of(plan: PagedPlan) -> list[list[int]]:
    assert plan.physical_table is not None
    table: list[list[int]] = plan.physical_table.tolist()
    return table


def test_4_the_physical_table_is_every_fourth_kernel_block_divided_by_four() -> None:
    assert physical_of(plan_of(KERNEL, Granularity.KERNEL)) == PHYSICAL


def test_4_a_table_in_physical_blocks_stays_as_it_is() -> None:
    assert physical_of(plan_of(PHYSICAL, Granularity.PHYSICAL)) == PHYSICAL
    # Also one whose columns the ratio happens to divide: the granularity is said, not guessed (reference behaviour 24).
    wide = [[3, 5, -1, -1], [7, -1, -1, -1]]
    assert physical_of(plan_of(wide, Granularity.PHYSICAL)) == PHYSICAL


def test_4_a_missing_block_stays_missing() -> None:
    kernel = [[-1, -1, -1, -1, 20, 21, 22, 23], KERNEL[1]]
    plan = plan_of(kernel, Granularity.KERNEL, strict=False)
    assert physical_of(plan) == [[-1, 5], [7, -1]]
    assert plan.block_table.tolist() == kernel


def test_4_sizes_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(StepError, match="kernel_block_size: got 3, expected a divisor of block_size 8"):
        CacheGroup("latent", GroupKind.LATENT, (0,), block_size=8, kernel_block_size=3, num_blocks=9)


def test_5_the_kernel_table_has_four_entries_for_each_physical_block() -> None:
    assert plan_of(PHYSICAL, Granularity.PHYSICAL).block_table.tolist() == KERNEL
    missing = plan_of([[-1, 5], [7, -1]], Granularity.PHYSICAL, strict=False)
    assert missing.block_table.tolist() == [[-1, -1, -1, -1, 20, 21, 22, 23], KERNEL[1]]


def test_5_a_table_in_kernel_blocks_is_used_as_it_is() -> None:
    assert plan_of(KERNEL, Granularity.KERNEL).block_table.tolist() == KERNEL


@pytest.mark.parametrize(
    ("table", "granularity"),
    [(KERNEL, Granularity.KERNEL), (PHYSICAL, Granularity.PHYSICAL)],
    ids=["kernel", "physical"],
)
def test_a_slot_is_the_same_number_in_both_granularities(table: list[list[int]], granularity: Granularity) -> None:
    # Positions 14 and 15 in block 5: 5*8 + 6, 5*8 + 7, or 23*2, 23*2 + 1. Positions 4..6 in block 7: 7*8 + 4 ..
    assert plan_of(table, granularity).slot.tolist() == [46, 47, 60, 61, 62]


def test_6_the_physical_table_follows_the_refreshed_kernel_table() -> None:
    table = torch.tensor(KERNEL, dtype=torch.int32)
    arena = make_arena([GROUP], max_rows=2, max_tokens=8, max_context=16)

    def fill() -> PagedPlan:
        step = make_step([GROUP], Phase.PREFILL, [2, 3], [14, 4], {"latent": table}, granularity=Granularity.KERNEL)
        plan = build_plan(step, arena).groups[0]
        assert isinstance(plan, PagedPlan)
        return plan

    captured = fill()
    # The host moves row 0 to blocks 8 and 2, in the table that it refreshes and nowhere else.
    table[0] = torch.tensor([32, 33, 34, 35, 8, 9, 10, 11])
    fill()
    assert physical_of(captured) == [[8, 2], [7, -1]]
    assert captured.slot.tolist() == [22, 23, 60, 61, 62]


def test_11_rows_of_tokens_and_causal_spans() -> None:
    step = make_step(
        [GROUP],
        Phase.PREFILL,
        [3, 2],
        [5, 0],
        {"latent": torch.tensor([[3], [7]], dtype=torch.int32)},
        padded_rows=3,
        padded_tokens=7,
    )
    shared = build_plan(step, make_arena([GROUP], max_rows=3, max_tokens=7, max_context=8)).shared
    assert shared.row_of_token.tolist() == [0, 0, 0, 1, 1, -1, -1]
    assert shared.span_start.tolist() == [0, 0, 0, 3, 3, 0, 0]
    assert shared.span_end.tolist() == [1, 2, 3, 4, 5, 0, 0]


def test_15_the_module_that_holds_the_indexer_is_the_layer() -> None:
    layers = discover_layers(tiny_model("glm_moe_dsa"))
    assert [layer.name for layer in layers] == [f"model.layers.{index}.self_attn" for index in range(3)]
    assert [layer.kind for layer in layers] == [GroupKind.LATENT] * 3
    # 32 elements of latent and 8 of rotary key a token; layer 1 attends to what layer 0 chose.
    index = IndexSpec(dim=16, dtype=torch.float32)
    assert [layer.spec for layer in layers] == [
        LatentSpec(40, torch.float32, index),
        LatentSpec(40, torch.float32, None),
        LatentSpec(40, torch.float32, index),
    ]
    (group,) = group_layers(layers, block_size=64, kernel_block_size=16, num_blocks={GroupKind.LATENT: 10})
    assert (group.kind, group.layers, group.num_kernel_blocks) == (GroupKind.LATENT, (0, 1, 2), 40)


def test_15_dense_latent_layers_are_found_by_class() -> None:
    layers = discover_layers(tiny_model("deepseek_v3"))
    assert [(layer.index, layer.spec) for layer in layers] == [(i, LatentSpec(40, torch.float32)) for i in range(3)]


def test_17_a_layer_reads_the_hosts_memory_itself() -> None:
    buffer = torch.zeros(36, 2, 40)  # 9 blocks of 4 kernel blocks
    pages = latent_pages(buffer, LatentSpec(40, torch.float32), GROUP, 0)
    pages.latent[23, 1] = 7
    assert buffer.view(-1, 40)[47].tolist() == [7.0] * 40
    attention = CacheGroup("full", GroupKind.ATTENTION, (1,), 8, 2, num_blocks=9)
    raw = torch.zeros(36, 2, 1, 2, 4)
    kv_pages(raw, KVSpec(1, 4, torch.float32), attention, 1).value[23] = 7
    assert raw[23, 1].unique().tolist() == [7.0]
    assert raw.sum() == 7 * 8


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ({}, "layer 0: got no cache buffer"),
        ({0: torch.zeros(())}, r"layer 0 latent buffer: got shape \(\), expected \(36, 2, 40\)"),
        ({0: torch.zeros(36, 2, 39)}, r"layer 0 latent buffer: got shape \(36, 2, 39\), expected \(36, 2, 40\)"),
        ({0: torch.zeros(36, 2, 40).half()}, r"layer 0 latent buffer: got torch.float16, expected torch.float32"),
    ],
)
def test_17_a_missing_or_unfit_buffer_is_named_with_its_layer(buffers: dict[int, torch.Tensor], message: str) -> None:
    with pytest.raises(StepError, match=message):
        Caches.of([GROUP], {0: LatentSpec(40, torch.float32)}, buffers)


INDEXED = LatentSpec(40, torch.float32, IndexSpec(16, torch.bfloat16))


def pages_of(caches: Caches) -> tuple[LatentPages, torch.Tensor]:
    pages = caches[0]
    assert isinstance(pages, LatentPages)
    assert pages.index_key is not None
    return pages, pages.index_key


def test_20_index_keys_that_the_host_does_not_carry_have_its_blocks() -> None:
    buffers = {0: torch.zeros(36, 2, 40)}
    caches = Caches.of([GROUP], {0: INDEXED}, buffers)
    pages, index_key = pages_of(caches)
    assert (index_key.shape, index_key.dtype) == ((36, 2, 16), torch.bfloat16)
    assert index_key.untyped_storage().nbytes() == 72 * 16 * 2  # 72 tokens
    caches.update([GROUP], {0: INDEXED}, buffers)
    assert pages_of(caches) == (pages, index_key)
    assert caches.generation == 1


def test_20_index_keys_that_the_host_carries_are_its_memory() -> None:
    index_buffer = torch.zeros(36, 2, 16, dtype=torch.bfloat16)
    caches = Caches.of([GROUP], {0: INDEXED}, {0: torch.zeros(36, 2, 40)}, {0: index_buffer})
    pages_of(caches)[1][5, 1] = 3
    assert index_buffer.view(-1, 16)[11].tolist() == [3.0] * 16


STORAGE = torch.zeros(200_000)


@pytest.mark.parametrize(
    "other",
    [
        STORAGE[40:][: 36 * 2 * 40].view(36, 2, 40),  # offset and pointer
        STORAGE.as_strided((36, 2, 40), (160, 80, 2)),  # strides alone
        STORAGE.view(torch.float32)[: 36 * 2 * 40].view(36, 2, 40).clone(),  # other memory
    ],
    ids=["offset", "stride", "memory"],
)
def test_20_owned_index_keys_go_with_the_buffer_that_they_belong_to(other: torch.Tensor) -> None:
    caches = Caches.of([GROUP], {0: INDEXED}, {0: STORAGE[: 36 * 2 * 40].view(36, 2, 40)})
    _, index_key = pages_of(caches)
    caches.update([GROUP], {0: INDEXED}, {0: other})
    assert pages_of(caches)[1] is not index_key
    assert caches.generation == 2


def test_20_a_change_of_the_hosts_index_buffer_alone_is_seen() -> None:
    buffers, keys = {0: torch.zeros(36, 2, 40)}, torch.zeros(36, 2, 32, dtype=torch.bfloat16)
    caches = Caches.of([GROUP], {0: INDEXED}, buffers, {0: keys[..., :16]})
    caches.update([GROUP], {0: INDEXED}, buffers, {0: keys[..., 16:]})
    assert caches.generation == 2
    assert pages_of(caches)[1].data_ptr() == keys[..., 16:].data_ptr()
    caches.update([GROUP], {0: INDEXED}, buffers)
    assert caches.generation == 3


@pytest.mark.parametrize(
    ("spec", "index_buffer", "message"),
    [
        (INDEXED, torch.zeros(36, 2, 8), r"layer 0 index key buffer: got shape \(36, 2, 8\), expected \(36, 2, 16\)"),
        (INDEXED, torch.zeros(36, 2, 16), "layer 0 index key buffer: got torch.float32, expected torch.bfloat16"),
        (LatentSpec(40, torch.float32), torch.zeros(36, 2, 16), "expected none: the layer runs no indexer"),
    ],
)
def test_20_index_buffers_that_do_not_fit_are_errors(
    spec: LatentSpec, index_buffer: torch.Tensor, message: str
) -> None:
    with pytest.raises(StepError, match=message):
        Caches.of([GROUP], {0: spec}, {0: torch.zeros(36, 2, 40)}, {0: index_buffer})


def test_20_a_bind_nests_and_gives_back_what_was_bound_before_on_every_exit() -> None:
    model = tiny_model("deepseek_v32", num_hidden_layers=1, mlp_layer_types=["dense"])
    step = make_step([GROUP], Phase.DECODE, [1], [0], {"latent": torch.tensor([[3]], dtype=torch.int32)})
    plan = build_plan(step, make_arena([GROUP], max_rows=1, max_tokens=1, max_context=8))
    (layer,) = discover_layers(model)
    outer, inner = (Caches.of([GROUP], {0: layer.spec}, {0: torch.zeros(36, 2, 40)}) for _ in range(2))
    attributes = dict(vars(layer.module))
    with bind(plan, outer, model):
        bound_forward = layer.module.forward
        with pytest.raises(ZeroDivisionError), bind(plan, inner, model):  # noqa: PT012
            assert current().latent(0)[1] is inner[0]
            raise ZeroDivisionError
        assert current().latent(0)[1] is outer[0]
        assert layer.module.forward is bound_forward
    with pytest.raises(NotBoundError):
        current()
    assert vars(layer.module) == attributes
