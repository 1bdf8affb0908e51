"""Compile every kernel ahead of time for NVIDIA and AMD, without a GPU. Prints a line of JSON for each.

A script of its own, because Triton's interpreter and its compiler exclude each other in one process. The ops run on
CPU tensors at a large model's shapes while their launches are only recorded: what is compiled is what they launch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from stepbind.caches import KVPages, LatentPages, StateSlots
from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops import (
    fla_gated_delta,
    triton_attention,
    triton_cache_write,
    triton_causal_conv,
    triton_delta_decode,
    triton_gated_delta,
    triton_indexer,
    triton_latent_attention,
    triton_linear,
    triton_pdl,
)
from stepbind.ops.decay import Decay
from stepbind.ops.delta_decode import DeltaWeights
from stepbind.plan import build_plan, make_arena
from stepbind.step import Phase, make_step

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
SHARED_BYTES = {"sm_90": 227 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    arguments: tuple[Any, ...]
    options: dict[str, int]

    def source(self) -> ASTSource:
        """The kernel with its arguments' types, and what Triton notes of them: 1, and multiples of 16."""
        signature: dict[str, Any] = {}
        constants: dict[Any, Any] = {}
        attributes: dict[Any, Any] = {}
        for index, (parameter, value) in enumerate(zip(self.kernel.params, self.arguments, strict=True)):
            specialise = not (parameter.is_constexpr or parameter.do_not_specialize)
            if parameter.is_constexpr or (specialise and value is not True and type(value) is int and value == 1):
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPES[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, tuple):  # of tensors
                signature[parameter.name] = tuple("*" + TYPES[each.dtype] for each in value)
                attributes |= {(index, part): [["tt.divisibility", 16]] for part in range(len(value))}
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
                if specialise and value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)

    def key(self) -> str:
        source = self.source()
        return f"{self.kernel.__name__} {source.signature} {source.constants} {source.attrs} {self.options}"


def recorded(work: Callable[[], None]) -> list[Launch]:
    """The launches that `work` makes; no kernel runs."""
    launches: dict[str, Launch] = {}

    class NotLaunched:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments: None

    def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: int) -> NotLaunched:
        launch = Launch(kernel, arguments, options)
        launches.setdefault(launch.key(), launch)
        return NotLaunched()

    patched = JITFunction.run
    JITFunction.run = record
    try:
        work()
    finally:
        JITFunction.run = patched
    return list(launches.values())


def run_ops(dtype: torch.dtype, state_dtype: torch.dtype, phase: Phase, rows: int, query: int, context: int) -> None:
    """Fill and all ops for one layer of each kind, of a model with 16 heads of 256, 2 KV heads, 16 heads of 128."""
    attention = CacheGroup("attention", GroupKind.ATTENTION, (0,), 64, 16, 1024)
    state = CacheGroup("state", GroupKind.STATE, (1,), 64, 64, 1024)
    columns = context // 64 + query + 2
    tables = {name: torch.ones(rows, columns, dtype=torch.int32) for name in ("attention", "state")}
    lengths = ([query] * rows, [context] * rows)
    step = make_step((attention, state), phase, *lengths, tables)
    widest = context + query if rows == 1 else 16384  # tables that a fill copies with 2 warps, and with 4
    arena = make_arena((attention, state), max_rows=rows, max_tokens=rows * query, max_context=widest)
    build_plan(step, arena, strict=False, triton=True)
    if phase is Phase.DECODE:
        pair = (step.query_len, step.prior_len)
        known = [dataclasses.replace(lengths, device=torch.from_numpy(lengths.host)) for lengths in pair]
        of_contexts = dataclasses.replace(step, query_len=known[0], prior_len=known[1], contexts_on_device=True)
        build_plan(of_contexts, arena, strict=False, triton=True)
    plan = build_plan(step, arena, strict=False, triton=False)
    tokens, shared, sizes = rows * query, plan.shared, plan.sizes
    paged: Any = plan.groups[0]
    states: Any = plan.groups[1]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    pages = empty(attention.num_kernel_blocks, 2, 2, 16, 256)
    cache = KVPages(pages[:, 0], pages[:, 1])
    triton_cache_write.write_kv(cache, empty(tokens, 2, 256), empty(tokens, 2, 256), paged.slot)
    triton_attention.paged_attention(empty(tokens, 16, 256), cache, paged, shared, sizes, 0.0625)
    mixed = empty(tokens, 6144)
    conv = empty(16, 3, 6144)
    triton_causal_conv.causal_conv(mixed, empty(6144, 4), None, conv, states, shared, True)
    heads = [part.unflatten(-1, (16, 128)) for part in mixed.split(2048, dim=-1)]
    decay = Decay(empty(tokens, 16), empty(16, dtype=torch.float32), empty(16, dtype=torch.float32))
    recurrent = empty(16, 16, 128, 128, dtype=state_dtype)
    triton_gated_delta.recurrent_gated_delta(*heads, decay, empty(tokens, 16), recurrent, states, shared, sizes)
    if phase is Phase.DECODE:
        query, key, value, gate = empty(tokens, 16, 512).split(128, dim=-1)
        a, b = empty(tokens, 16, 2).split(1, dim=-1)
        weights = DeltaWeights(empty(6144, 4), None, decay.A_log, decay.dt_bias, empty(128), 1e-6, 1.0)
        slots = StateSlots(recurrent, conv)
        triton_delta_decode.delta_decode(query, key, value, gate, a[..., 0], b[..., 0], weights, slots, states, shared)
    if phase is Phase.PREFILL:
        fla_gated_delta._chunk_function = lambda: lambda *a, **k: (a[2], k["initial_state"])
        fla_gated_delta.chunked_gated_delta(*heads, decay, empty(tokens, 16), recurrent, states, shared, sizes)


def run_latent_ops(dtype: torch.dtype, phase: Phase, rows: int, query: int, context: int, heads: int = 128) -> None:
    """Fill and all ops for one layer of DeepSeek-V3.2, or of a part of its heads."""
    latent = CacheGroup("latent", GroupKind.LATENT, (0,), 64, 64, 1024)
    tables = {"latent": torch.ones(rows, context // 64 + query + 1, dtype=torch.int32)}
    step = make_step((latent,), phase, [query] * rows, [context] * rows, tables)
    arena = make_arena((latent,), max_rows=rows, max_tokens=rows * query, max_context=context + query)
    plan = build_plan(step, arena, strict=False, triton=False)
    tokens, shared, sizes = rows * query, plan.shared, plan.sizes
    group: Any = plan.groups[0]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    pages, keys = LatentPages(empty(latent.num_blocks, 64, 576)), empty(latent.num_blocks, 64, 128)
    triton_cache_write.write_tokens(pages.latent, empty(tokens, 512), empty(tokens, 64), group.slot)
    triton_cache_write.write_tokens(keys, empty(tokens, 128), None, group.slot)
    index_weight = empty(tokens, 64, dtype=torch.float32)
    chosen = triton_indexer.choose_tokens(empty(tokens, 64, 128), index_weight, keys, 2048, group, shared, sizes)
    inputs = empty(tokens, heads, 192), empty(heads, 256, 512), pages
    triton_latent_attention.latent_attention(*inputs, group, shared, sizes, 0.07)
    triton_latent_attention.sparse_latent_attention(*inputs, chosen, group, shared, 0.07)


def run_products(dtype: torch.dtype, rows: int) -> None:
    """The products of such a model's decode pass that are ours, by the shapes of the weights that share an input."""
    arrived = torch.zeros(1, dtype=torch.int32)
    for in_features, *widths in (
        (2048, 8192, 32),
        (2048, 8192, 512, 512),
        (2048, 6144, 6144),
        (2048, 2048),
        (4096, 2048),
        (6144, 2048),
    ):
        x, *weights = (torch.empty(n, in_features, dtype=dtype) for n in (rows, *widths))
        bias = torch.empty(widths[-1], dtype=dtype) if len(widths) == 3 else None
        biases = (*[None] * (len(widths) - 1), bias)
        triton_linear.few_rows_linear(x, tuple(weights), biases, arrived)


def main(target: str) -> None:
    for module in (triton_attention, triton_latent_attention):
        module.shared_memory_bytes = lambda device: SHARED_BYTES[target]
    is_nvidia = TARGETS[target].backend == "cuda"
    triton_pdl.launches_early = lambda device: is_nvidia
    if not is_nvidia:
        triton_linear.STAGES = triton_linear.STAGES_OF_TWO = 2

    def work() -> None:
        for rows in (1, 4, 8, 32):
            run_products(torch.bfloat16, rows)
        run_products(torch.float16, 32)
        run_ops(torch.bfloat16, torch.bfloat16, Phase.DECODE, 256, 1, 512)
        run_ops(torch.bfloat16, torch.float32, Phase.DECODE, 1, 1, 512)
        run_ops(torch.bfloat16, torch.float32, Phase.VERIFY, 4, 3, 512)
        run_ops(torch.bfloat16, torch.float32, Phase.PREFILL, 2, 130, 512)
        run_ops(torch.float32, torch.float32, Phase.DECODE, 1, 1, 512)
        run_ops(torch.float32, torch.float32, Phase.PREFILL, 2, 130, 512)
        run_latent_ops(torch.bfloat16, Phase.DECODE, 32, 1, 4095)
        run_latent_ops(torch.bfloat16, Phase.DECODE, 1, 1, 4095, heads=16)
        run_latent_ops(torch.bfloat16, Phase.PREFILL, 2, 130, 4000)
        run_latent_ops(torch.float32, Phase.DECODE, 1, 1, 4095)

    for launch in recorded(work):
        compiled = triton.compile(launch.source(), target=TARGETS[target], options=launch.options)
        line = {"kernel": launch.kernel.__name__, "shared": compiled.metadata.shared, "options": launch.options}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
