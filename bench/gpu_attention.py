"""Attention of one layer by our kernels and by the libraries': against float32, and timed side by side in a graph.

    python bench/gpu_attention.py
    TRITON_INTERPRET=1 python bench/gpu_attention.py --dry   # tiny shapes on the CPU; nothing is timed

All variants attend the same new tokens over the same context. Ours and the libraries' paged kernels read the pages;
torch's varlen attention reads the new tokens' own keys, or, behind a context, a copy that it is timed with; torch's
scaled_dot_product_attention, the yardstick, finds the whole context in one piece and is not timed with a copy. The
floor is a pass's products over a large product's rate or its bytes over a large copy's, whichever is longer; the
column of that name says how much of a variant's GPU time it is. host: us of an eager call. error: the largest of a
token, ||got - exact|| / ||exact||. What a library refuses is listed with its reason. Prints tables, asserts nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from gpu_ops import matrix_rate
from gpu_timing import copy_bytes_per_us, graph_us, host_us_in_turn, machine, require_gpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from stepbind.caches import KVPages
from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops import triton_attention, triton_cache_write
from stepbind.ops.varlen_attention import varlen_attention, varlen_function
from stepbind.plan import PagedPlan, Plan, build_plan, make_arena
from stepbind.step import Phase, make_step

PAGE = 64
OUT_OF_CACHE, MOST_LAYERS = 2**28, 64
"""Bytes that all layers together have at least, up to so many layers: an H200's cache holds 50 MiB."""
OURS, VARLEN = "ours", "torch varlen"
WRONG = 2e-2
"""Largest error of a token that 16-bit types explain."""


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Pass:
    """`query` new tokens behind `prior` ones in each of `rows` rows. Contexts are whole pages."""

    phase: Phase
    rows: int
    query: int
    prior: int

    @property
    def context(self) -> int:
        return self.query + self.prior

    def __str__(self) -> str:
        return f"{self.phase.value} {self.rows} x {self.query} behind {self.prior}"


def prefill(rows: int, query: int, prior: int = 0) -> Pass:
    return Pass(Phase.PREFILL, rows, query, prior)


def decode(rows: int, context: int) -> Pass:
    return Pass(Phase.DECODE, rows, 1, context - 1)


HEADS = (Heads(32, 8, 128), Heads(16, 2, 256))
PASSES = (
    prefill(1, 8192),
    prefill(4, 2048),
    prefill(16, 512),
    prefill(1, 512),
    prefill(1, 2048, 6144),
    decode(1, 512),
    decode(32, 512),
    decode(256, 512),
    decode(32, 8192),
)
DRY_HEADS = (Heads(4, 2, 16),)
DRY_PASSES = (prefill(2, PAGE), prefill(1, PAGE // 2, PAGE // 2), decode(3, PAGE))


@dataclass(frozen=True, eq=False)
class Layer:
    """What attention of one layer reads. B rows, T tokens, L context tokens a row."""

    of: Pass
    heads: Heads
    plan: Plan
    group: PagedPlan
    pages: KVPages
    query: torch.Tensor  # [T, query heads, D]
    key: torch.Tensor  # [T, KV heads, D], the new tokens', which the pages hold too
    value: torch.Tensor
    context_start: torch.Tensor  # [B+1] int32, offsets of rows of L tokens
    contexts: tuple[torch.Tensor, torch.Tensor]  # keys and values in one piece, [B, KV heads, L, D]

    @property
    def scale(self) -> float:
        return float(self.heads.dim**-0.5)


def plan_of(of: Pass, device: str) -> Plan:
    columns = of.context // PAGE
    group = CacheGroup("attention", GroupKind.ATTENTION, (0,), PAGE, PAGE, of.rows * columns + 1)
    order = torch.randperm(of.rows * columns, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
    tables = {"attention": order.reshape(of.rows, columns) + 1}
    step = make_step((group,), of.phase, [of.query] * of.rows, [of.prior] * of.rows, tables)
    arena = make_arena((group,), max_rows=of.rows, max_tokens=step.num_tokens, max_context=of.context, device=device)
    return build_plan(step, arena, strict=True)


def layer_of(of: Pass, heads: Heads, plan: Plan, dtype: torch.dtype) -> Layer:
    group = plan.groups[0]
    assert isinstance(group, PagedPlan)
    device = group.slot.device

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_()

    tokens = of.rows * of.query
    buffer = normal(group.group.num_kernel_blocks, 2, heads.kv, PAGE, heads.dim)
    pages = KVPages(buffer[:, 0], buffer[:, 1])
    query, key, value = (normal(tokens, count, heads.dim) for count in (heads.query, heads.kv, heads.kv))
    triton_cache_write.write_kv(pages, key, value, group.slot)
    start = torch.arange(of.rows + 1, dtype=torch.int32, device=device) * of.context
    layer = Layer(of, heads, plan, group, pages, query, key, value, start, (key, value))
    k, v = (each.unflatten(0, (of.rows, -1)).transpose(1, 2).contiguous() for each in gather(layer))
    return replace(layer, contexts=(k, v))


def gather(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B * L, KV heads, D] of the rows' contexts, copied out of the pages."""
    blocks = layer.group.block_table.flatten()
    key, value = (each.transpose(1, 2).index_select(0, blocks) for each in (layer.pages.key, layer.pages.value))
    return key.flatten(0, 1), value.flatten(0, 1)


class NotSupportedError(Exception):
    pass


def ours(layer: Layer) -> torch.Tensor:
    plan = layer.plan
    return triton_attention.paged_attention(layer.query, layer.pages, layer.group, plan.shared, plan.sizes, layer.scale)


def torch_varlen(layer: Layer) -> torch.Tensor:
    """As `models.attention` would call it; behind a context, over a copy of all keys and values."""
    shared, sizes, of = layer.plan.shared, layer.plan.sizes, layer.of
    if of.prior == 0:
        return varlen_attention(layer.query, layer.key, layer.value, shared, sizes, layer.scale)
    key, value = gather(layer)
    ends, lengths = (shared.query_start, layer.context_start), (of.query, of.context)
    out: torch.Tensor = varlen_function()(
        layer.query, key, value, *ends, *lengths, scale=layer.scale, window_size=(-1, 0)
    )
    return out


def torch_paged(layer: Layer) -> torch.Tensor:
    if "block_table" not in signature(varlen_attn).parameters:
        raise NotSupportedError(f"torch {torch.__version__} has no block tables")
    shared, of = layer.plan.shared, layer.of
    out: torch.Tensor = varlen_function()(
        layer.query,
        layer.pages.key.transpose(1, 2),
        layer.pages.value.transpose(1, 2),
        shared.query_start,
        None,
        of.query,
        of.context,
        scale=layer.scale,
        window_size=(-1, 0),
        seqused_k=shared.context_len,
        block_table=layer.group.block_table,
    )
    return out


def sdpa(backend: SDPBackend, layer: Layer) -> torch.Tensor:
    of = layer.of
    query = layer.query.unflatten(0, (of.rows, of.query)).transpose(1, 2)
    mask: Any = causal_lower_right(of.query, of.context) if of.prior and of.query > 1 else None
    causal = of.prior == 0 and of.query > 1
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(
            query, *layer.contexts, mask, is_causal=causal, scale=layer.scale, enable_gqa=True
        )
    return out.transpose(1, 2).flatten(0, 1)


def flashinfer_runs(layers: list[Layer]) -> list[Callable[[], torch.Tensor]]:
    """FlashInfer's kernel over head-major pages, by its documented interface; it plans once for all layers."""
    try:
        import flashinfer  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise NotSupportedError(str(error)) from None
    first = layers[0]
    of, heads, table = first.of, first.heads, first.group.block_table
    workspace = torch.empty(2**28, dtype=torch.uint8, device=table.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND")
    wrapper.plan(
        first.plan.shared.query_start,
        first.context_start // PAGE,
        table.flatten(),
        torch.full((of.rows,), PAGE, dtype=torch.int32, device=table.device),  # tokens in the last page
        heads.query,
        heads.kv,
        heads.dim,
        PAGE,
        causal=True,
        sm_scale=first.scale,
        q_data_type=first.query.dtype,
    )
    return [partial(wrapper.run, each.query, (each.pages.key, each.pages.value)) for each in layers]


def each_layer(attend: Callable[[Layer], torch.Tensor], layers: list[Layer]) -> list[Callable[[], torch.Tensor]]:
    return [partial(attend, layer) for layer in layers]


VARIANTS: dict[str, Callable[[list[Layer]], list[Callable[[], torch.Tensor]]]] = {
    OURS: partial(each_layer, ours),
    VARLEN: partial(each_layer, torch_varlen),
    "torch varlen, paged": partial(each_layer, torch_paged),
    "FlashInfer, paged": flashinfer_runs,
    "SDPA, Flash": partial(each_layer, partial(sdpa, SDPBackend.FLASH_ATTENTION)),
    "SDPA, cuDNN": partial(each_layer, partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
}


def exact(layer: Layer) -> torch.Tensor:
    """The layer's attention in float32, some queries at a time."""
    of, (key, value) = layer.of, layer.contexts
    query = layer.query.float().unflatten(0, (of.rows, of.query))  # [B, queries, heads, D]
    heads_per_kv, at_once = layer.heads.query // layer.heads.kv, 512
    position = torch.arange(of.context, device=query.device)
    out = torch.empty_like(query)
    for row in range(of.rows):
        k, v = (each[row].float().repeat_interleave(heads_per_kv, dim=0) for each in (key, value))
        for first in range(0, of.query, at_once):
            q = query[row, first : first + at_once].transpose(0, 1)
            own = of.prior + first + torch.arange(q.shape[1], device=query.device)
            scores = (q @ k.mT * layer.scale).masked_fill(position > own[:, None], float("-inf"))
            out[row, first : first + at_once] = (scores.softmax(dim=-1) @ v).transpose(0, 1)
    return out.flatten(0, 1)


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest ||got - want|| / ||want|| of a token; NaN where any is."""
    return float(((got.float() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)).max())


Measure = Callable[[list[Callable[[], Any]]], tuple[float, float]]


def timed(works: list[Callable[[], Any]]) -> tuple[float, float]:
    """GPU time of one work inside a graph, and host time of an eager call, in us."""
    us = graph_us(works, repeat=10, rounds=max(1, 8 // len(works)))
    return us, host_us_in_turn(works[:1], repeat=30, warmup_s=0.05)[0]


def untimed(works: list[Callable[[], Any]]) -> tuple[float, float]:
    for work in works:
        work()
    return float("nan"), float("nan")


def floor_us(of: Pass, heads: Heads, bandwidth: float, rate: float) -> tuple[float, float, float]:
    """Floor of a pass, its floating-point operations, and the bytes that it must move."""
    tokens = of.rows * of.query
    flops = 4 * heads.query * heads.dim * of.rows * (of.query * of.prior + of.query * (of.query + 1) / 2)
    moved = 4 * heads.dim * (of.rows * of.context * heads.kv + tokens * heads.query)
    return max(moved / bandwidth, flops / rate), flops, moved


@dataclass(frozen=True)
class Machine:
    device: str
    dtype: torch.dtype
    measure: Measure
    bandwidth: float  # bytes per us
    rate: float  # floating-point operations per us


def compare(of: Pass, heads: Heads, on: Machine, refused: dict[str, list[str]]) -> float:
    """Print what each variant takes; returns torch varlen's time over ours. refused: passes by variant and reason."""
    floor, flops, moved = floor_us(of, heads, on.bandwidth, on.rate)
    unit, work = ("TFLOP/s", flops) if of.phase is Phase.PREFILL else ("TB/s", moved)
    title = f"{of}, {heads.query}/{heads.kv} heads of {heads.dim}: floor {floor:.1f} us"
    print(f"{title}\n  {'':20}{'us':>9}{unit:>9}{'floor':>7}{'/ours':>7}{'host':>6}  error", flush=True)
    plan = plan_of(of, on.device)
    count = 1 if of.phase is Phase.PREFILL else max(1, min(MOST_LAYERS, int(OUT_OF_CACHE // moved)))
    layers = [layer_of(of, heads, plan, on.dtype) for _ in range(count)]
    want = exact(layers[0])
    times: dict[str, float] = {}
    for name, prepare in VARIANTS.items():
        try:
            works = prepare(layers)
            error = largest_error(works[0](), want)
            times[name], host = on.measure(works)
        except Exception as problem:  # whatever a library raises: it can't serve this pass
            reason = " ".join(str(problem).split())[:140] or type(problem).__name__
            refused.setdefault(f"{name}: {reason}", []).append(f"{of}, {heads.dim}")
            continue
        us = times[name]
        speed, ratio = work / us / 1e6, us / times.get(OURS, float("nan"))
        wrong = "" if error < WRONG else "  WRONG"
        figures = f"{us:9.1f}{speed:9.2f}{floor / us:7.0%}{ratio:7.2f}{host:6.0f}  {error:.0e}"
        print(f"  {name:20}{figures}{wrong}", flush=True)
    return times.get(VARLEN, float("nan")) / times.get(OURS, float("nan"))


@torch.inference_mode()
def main() -> None:
    dry = "--dry" in sys.argv
    warnings.simplefilter("ignore")  # SDPA explains every backend that it was not asked for
    torch.manual_seed(0)
    if dry:
        on = Machine("cpu", torch.float16, untimed, float("nan"), float("nan"))
    else:
        require_gpu()
        print(machine())
        on = Machine("cuda", torch.bfloat16, timed, copy_bytes_per_us(), matrix_rate())
        speeds = f"{on.bandwidth / 1e6:.2f} TB/s, a large bf16 product runs at {on.rate / 1e6:.0f} TFLOP/s"
        print(f"a large copy moves {speeds}")
    refused: dict[str, list[str]] = {}
    ratios: list[str] = []
    for heads in DRY_HEADS if dry else HEADS:
        for of in DRY_PASSES if dry else PASSES:
            ratio = compare(of, heads, on, refused)
            if of.phase is Phase.PREFILL:
                ratios.append(f"  head dim {heads.dim}, {of}: {ratio:.2f}")
    print("not supported:")
    for reason, passes in refused.items():
        print(f"  {reason} ({len(passes)} passes, first {passes[0]})")
    print("torch varlen / ours, GPU time (below 1: faster; varlen_attention.FASTER_FROM):")
    print("\n".join(ratios))


if __name__ == "__main__":
    main()
