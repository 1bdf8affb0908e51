"""Each GPU op of one sparse latent (MLA) layer: checked against the CPU in float32, and timed inside a graph.

    python bench/gpu_latent_ops.py            # every op against its floor
    python bench/gpu_latent_ops.py --tiles    # attention alone, by what its programs work on

Shapes are DeepSeek-V3.2's: 128 heads on latents of 512 and rotary keys of 64, an indexer of 64 heads of 128 that
chooses 2048 tokens, bf16. Floors are the bytes that an op must move over the bandwidth of a large copy, or its products
over a large matrix product's rate, whichever is longer; the choice itself has only its scores to read. Works go round
as many layers as it takes for a cache not to hold them. Prints tables, asserts nothing but equality.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
from gpu_ops import matrix_rate
from gpu_timing import copy_bytes_per_us, graph_us, machine, require_gpu

from stepbind.caches import LatentPages
from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops import triton_indexer, triton_latent_attention, triton_top_k
from stepbind.ops.cache_write import write_latent, write_tokens
from stepbind.ops.indexer import choose_tokens
from stepbind.ops.latent_attention import latent_attention, sparse_latent_attention
from stepbind.ops.triton_latent_attention import Tiles
from stepbind.plan import PagedPlan, Plan, build_plan, make_arena
from stepbind.step import Phase, make_step

HEADS, NOPE_DIM, ROTARY_DIM, VALUE_DIM, RANK = 128, 128, 64, 128, 512
INDEX_HEADS, INDEX_DIM, TOP_K, PAGE = 64, 128, 2048, 64
SCALE = (NOPE_DIM + ROTARY_DIM) ** -0.5
BF16 = torch.bfloat16
OUT_OF_CACHE = 2**28
"""Bytes that all layers together have at least: an H200's cache holds 50 MiB."""


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, device="cuda").to(dtype)


def plan_of(rows: int, query: int, context: int, device: str) -> Plan:
    """`query` new tokens in each row, `context` with them; the same blocks on any device."""
    columns = -(-context // PAGE)
    group = CacheGroup("latent", GroupKind.LATENT, (0,), PAGE, PAGE, rows * columns + 1)
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
    phase = Phase.DECODE if query == 1 else Phase.PREFILL
    tables = {"latent": order.reshape(rows, columns) + 1}
    step = make_step((group,), phase, [query] * rows, [context - query] * rows, tables)
    arena = make_arena((group,), max_rows=rows, max_tokens=rows * query, max_context=context, device=device)
    return build_plan(step, arena, strict=True)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's caches and what its ops take. T tokens."""

    pages: LatentPages
    keys: torch.Tensor
    query: torch.Tensor  # [T, heads, nope + rotary]
    absorbed: torch.Tensor  # [T, heads, rank]: what attention alone is timed on
    weight: torch.Tensor  # [heads, nope + value, rank]
    index_query: torch.Tensor
    index_weight: torch.Tensor
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # latent, rotary key, index key

    @staticmethod
    def of(plan: Plan) -> Layer:
        tokens, blocks = plan.sizes.num_tokens, plan.groups[0].group.num_kernel_blocks
        pages = LatentPages(torch.empty(blocks, PAGE, RANK + ROTARY_DIM, dtype=BF16, device="cuda").normal_())
        return Layer(
            pages=pages,
            keys=torch.empty(blocks, PAGE, INDEX_DIM, dtype=BF16, device="cuda").normal_(),
            query=randn(tokens, HEADS, NOPE_DIM + ROTARY_DIM),
            absorbed=randn(tokens, HEADS, RANK),
            weight=(randn(HEADS, NOPE_DIM + VALUE_DIM, RANK, dtype=torch.float32) * RANK**-0.5).to(BF16),
            index_query=randn(tokens, INDEX_HEADS, INDEX_DIM),
            index_weight=randn(tokens, INDEX_HEADS, dtype=torch.float32),
            new=(randn(tokens, RANK), randn(tokens, ROTARY_DIM), randn(tokens, INDEX_DIM)),
        )


def group_of(plan: Plan) -> PagedPlan:
    group = plan.groups[0]
    assert isinstance(group, PagedPlan)
    return group


def check(rows: int, query: int, context: int) -> None:
    """Against the CPU in float32 on the same numbers; leaves where a result is wrong."""
    there, here = plan_of(rows, query, context, "cuda"), plan_of(rows, query, context, "cpu")
    layer = Layer.of(there)
    pages = LatentPages(layer.pages.latent.float().cpu())
    inputs, exact = (layer.query, layer.weight), (layer.query.float().cpu(), layer.weight.float().cpu())
    chosen = choose_tokens(
        layer.index_query, layer.index_weight, layer.keys, TOP_K, group_of(there), there.shared, there.sizes
    )
    want = choose_tokens(
        layer.index_query.float().cpu(),
        layer.index_weight.cpu(),
        layer.keys.float().cpu(),
        TOP_K,
        group_of(here),
        here.shared,
        here.sizes,
    )
    columns = min(want.shape[1], chosen.shape[1])
    mine, theirs = (set(map(tuple, each.nonzero().tolist())) for each in (chosen_mask(chosen), chosen_mask(want)))
    out = sparse_latent_attention(*inputs, layer.pages, chosen, group_of(there), there.shared, SCALE)
    exact_out = sparse_latent_attention(*exact, pages, chosen.cpu()[:, :columns], group_of(here), here.shared, SCALE)
    dense = latent_attention(*inputs, layer.pages, group_of(there), there.shared, there.sizes, SCALE)
    exact_dense = latent_attention(*exact, pages, group_of(here), here.shared, here.sizes, SCALE)
    errors = [float((a.float().cpu() - b).norm() / b.norm()) for a, b in ((out, exact_out), (dense, exact_dense))]
    print(
        f"check, {rows} x {query} of {context}: {len(mine ^ theirs) // 2} of {len(theirs)} choices differ from float64 "
        f"scores', error {errors[0]:.1e} sparse, {errors[1]:.1e} dense",
        flush=True,
    )
    if not max(errors) < 2e-2 or len(mine ^ theirs) > len(theirs) // 500:
        raise SystemExit("a result is wrong")


def chosen_mask(chosen: torch.Tensor) -> torch.Tensor:
    """[T, longest context] bool of positions [T, K]."""
    mask = torch.zeros(chosen.shape[0], int(chosen.max()) + 2, dtype=torch.bool, device=chosen.device)
    return mask.scatter_(1, chosen.long() + 1, True)[:, 1:].cpu()


@dataclass(frozen=True)
class Op:
    name: str
    run: Callable[[Layer], Any]
    floor_bytes: float
    flops: float = 0.0


def ops_of(plan: Plan, query: int, context: int) -> list[Op]:
    rows, group, shared, sizes = plan.sizes.num_rows, group_of(plan), plan.shared, plan.sizes
    tokens, seen = rows * query, min(context, TOP_K)
    pairs, sparse_pairs = tokens * (context - (query - 1) / 2), tokens * seen
    entry, per_head = (RANK + ROTARY_DIM) * 2, 2 * (2 * RANK + ROTARY_DIM)
    ends = tokens * HEADS * (2 * RANK + ROTARY_DIM) * 2  # absorbed queries and weighted latents
    limit = group.block_table.shape[1] * PAGE
    scores = torch.empty(tokens, limit, dtype=torch.float32, device="cuda")
    chosen = torch.empty(tokens, seen, dtype=torch.int32, device="cuda")

    def score(layer: Layer) -> None:
        inputs = (layer.index_query, layer.index_weight, layer.keys)
        triton_indexer.index_scores(scores, *inputs, 0, limit, group, shared, sizes)

    def choose(layer: Layer) -> None:
        triton_top_k.best_positions(chosen, scores, 0, limit, shared)

    def attend(layer: Layer, chosen: torch.Tensor | None) -> torch.Tensor:
        longest = context if chosen is None else chosen.shape[1]
        inputs = (layer.absorbed, layer.query[..., NOPE_DIM:], layer.pages.latent)
        return triton_latent_attention.attend_latents(*inputs, chosen, group, shared, longest, SCALE)

    def whole(layer: Layer) -> torch.Tensor:
        return sparse_latent_attention(layer.query, layer.weight, layer.pages, chosen, group, shared, SCALE)

    score(first := Layer.of(plan))
    choose(first)
    del first
    sparse_bytes = min(sparse_pairs, rows * context) * entry
    weights = HEADS * (NOPE_DIM + VALUE_DIM) * RANK * 2
    projected = 2 * tokens * HEADS * RANK * (NOPE_DIM + VALUE_DIM)
    return [
        Op("write latents", lambda x: write_latent(x.pages, x.new[0], x.new[1], group.slot), 2 * tokens * entry),
        Op("write index keys", lambda x: write_tokens(x.keys, x.new[2], group.slot), 4 * tokens * INDEX_DIM),
        Op(
            "index scores",
            score,
            rows * context * INDEX_DIM * 2 + pairs * 4 + tokens * INDEX_HEADS * INDEX_DIM * 2,
            2 * pairs * INDEX_HEADS * INDEX_DIM,
        ),
        Op("choice by scores", choose, pairs * 4 + tokens * seen * 4),
        Op("sparse attention", lambda x: attend(x, chosen), sparse_bytes + ends, HEADS * sparse_pairs * per_head),
        Op(
            "  with its projections",
            whole,
            sparse_bytes + weights + tokens * HEADS * (NOPE_DIM + ROTARY_DIM + VALUE_DIM) * 2,
            HEADS * sparse_pairs * per_head + projected,
        ),
        Op("dense attention", lambda x: attend(x, None), rows * context * entry + ends, HEADS * pairs * per_head),
    ]


def timed(op: Op, layers: list[Layer]) -> float:
    """GPU time in us of an op of one layer, inside a graph of all of them."""
    return graph_us([partial(op.run, layer) for layer in layers], rounds=max(1, 16 // len(layers)), repeat=8)


def layers_of(plan: Plan) -> list[Layer]:
    keys = plan.groups[0].group.num_blocks * PAGE * INDEX_DIM * BF16.itemsize
    return [Layer.of(plan) for _ in range(max(1, min(64, -(-OUT_OF_CACHE // keys))))]


def report(rows: int, query: int, context: int, bandwidth: float, rate: float) -> None:
    """bandwidth: bytes per us of a large copy; rate: floating-point operations per us of a large matrix product."""
    plan = plan_of(rows, query, context, "cuda")
    layers = layers_of(plan)
    print(f"{rows} rows, {query} new tokens each, context {context}; {len(layers)} layers, per layer", flush=True)
    for op in ops_of(plan, query, context):
        us, floor = timed(op, layers), max(op.floor_bytes / bandwidth, op.flops / rate)
        bound = "bytes" if op.floor_bytes / bandwidth > op.flops / rate else "products"
        print(f"  {op.name:24} {us:10.2f} us, floor {floor:9.2f} ({bound:8}), {us / floor:7.2f}x", flush=True)


TILES = (
    *((16, 32, 4, 2), (16, 64, 4, 2), (32, 32, 4, 2), (32, 32, 8, 2), (32, 64, 4, 2), (32, 64, 8, 1), (32, 64, 8, 2)),
    *((64, 32, 4, 2), (64, 32, 8, 2), (64, 64, 4, 1), (64, 64, 8, 1), (64, 64, 8, 2)),
)


def try_tiles() -> None:
    """Sparse attention alone, by heads and context tokens at once, warps, and tiles under way."""
    shapes = ((1, 4096), (32, 4096), (128, 4096))
    found: dict[tuple[int, ...], list[str]] = {tiles: [] for tiles in TILES}
    for rows, context in shapes:
        plan = plan_of(rows, 1, context, "cuda")
        layers = layers_of(plan)
        op = next(op for op in ops_of(plan, 1, context) if op.name == "sparse attention")
        for tiles, cells in found.items():
            with patch.object(triton_latent_attention, "tiles_of", return_value=Tiles(*tiles)):
                try:
                    cells.append(f"{timed(op, layers):10.2f}")
                except triton.runtime.errors.OutOfResources:
                    cells.append("  too large")
        del layers
    print("heads, tokens, warps, stages:", *(f"{rows} x {context}" for rows, context in shapes), "(us)")
    for tiles, cells in found.items():
        print(f"  {tiles!s:18}", *cells)


def main() -> None:
    require_gpu()
    torch.manual_seed(0)
    print(machine())
    if "--tiles" in sys.argv[1:]:
        try_tiles()
        return
    bandwidth, rate = copy_bytes_per_us(), matrix_rate()
    print(f"a large copy moves {bandwidth / 1e6:.2f} TB/s, a large bf16 product runs at {rate / 1e6:.0f} TFLOP/s")
    for rows, query, context in ((2, 1, 4096), (1, 16, 3000)):
        check(rows, query, context)
    for context, rows in itertools.product((4096, 65536), (1, 32, 128)):
        report(rows, 1, context, bandwidth, rate)
    report(1, 2048, 4096, bandwidth, rate)


if __name__ == "__main__":
    main()
