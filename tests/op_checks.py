"""Random steps for the GPU's ops, and what each op must hold: the plain reference's result on the CPU, in float32.

Every cache holds NaN except where the step may read, and ids that a plan must not follow lead to other rows' blocks,
so that a stray read shows in the output and a stray write in the comparison of the whole cache.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch

from stepbind.caches import KVPages, StateSlots
from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops import (
    triton_attention,
    triton_cache_write,
    triton_causal_conv,
    triton_delta_decode,
    triton_gated_delta,
    triton_linear,
)
from stepbind.ops.decay import Decay
from stepbind.ops.delta_decode import DeltaWeights
from stepbind.ops.linear import ARRIVALS
from stepbind.ops.reference import (
    causal_conv_reference,
    gated_delta_reference,
    gated_norm_reference,
    paged_attention_reference,
)
from stepbind.plan import PagedPlan, Plan, StatePlan, build_plan, make_arena
from stepbind.step import Lengths, Phase, make_step

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference by dtype, against values of about 1: some units in the last place of each."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a check runs at. Sizes are small where an interpreter runs it."""

    dtype: torch.dtype = torch.float32
    kv_heads: int = 2
    heads_per_kv: int = 3
    head_dim: int = 24
    page: int = 16
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 24
    width: int = 4
    channels: int = 40
    longest: int = 30
    contexts: int = 3  # in blocks


def random_plan(rng: random.Random, kind: GroupKind, phase: Phase, shape: Shape) -> Plan:
    """Rows own distinct blocks, some entries are missing, there is padding; columns behind a context are rubbish."""
    size = rng.choice((1, 2, 4, 16)) if kind is GroupKind.STATE else shape.page * rng.choice((1, 2))
    kernel = size if kind is GroupKind.STATE else shape.page
    rows = rng.randint(1, 5)
    prior = [rng.choice((0, rng.randrange(shape.contexts * size + 1), size, size - 1)) for _ in range(rows)]
    longest = {Phase.DECODE: 1, Phase.VERIFY: 4, Phase.PREFILL: shape.longest}[phase]
    query = [rng.randint(1, longest) for _ in range(rows)]
    columns = max((n + q) // size + q * (phase is Phase.VERIFY) + 1 for n, q in zip(prior, query, strict=True))
    ids = list(range(1, rows * columns + 1))
    rng.shuffle(ids)
    group = CacheGroup("group", kind, (0,), size, kernel, num_blocks=len(ids) + 1)
    table = torch.tensor(ids, dtype=torch.int32).reshape(rows, columns)
    for _ in range(rng.choice((0, 0, 2))):
        table[rng.randrange(rows), rng.randrange(columns)] = rng.choice((-1, 0, len(ids) + 1, 2**31 - 1))
    query_len, prior_len = Lengths.of(query), Lengths.of(prior)
    bounds = phase is not Phase.PREFILL and rng.random() < 0.4
    if bounds:  # some rows are padding, known on the device alone
        live = torch.tensor([rng.random() < 0.6 for _ in range(rows)], dtype=torch.int32)
        query_len, prior_len = (Lengths(x.host, torch.from_numpy(x.host) * live) for x in (query_len, prior_len))
    step = make_step(
        [group],
        phase,
        query_len,
        prior_len,
        {"group": table},
        padded_rows=rows + rng.choice((0, 2)),
        padded_tokens=sum(query) + rng.choice((0, 3)),
        lengths_are_bounds=bounds,
    )
    arena = make_arena([group], max_rows=8, max_tokens=step.padded_tokens, max_context=step.max_context + size)
    plan = build_plan(step, arena, strict=False, triton=False)
    if kind is not GroupKind.STATE:
        blocks = arena.groups[0].block_table[: step.padded_rows]  # type: ignore[union-attr]
        behind = torch.arange(blocks.shape[1]) >= -(-plan.shared.context_len[:, None] // kernel)
        blocks.masked_fill_(behind, rng.randrange(group.num_kernel_blocks))
        plan = dataclasses.replace(plan, groups=(dataclasses.replace(plan.groups[0], block_table=blocks),))
    return plan


def moved(values: Any, device: torch.device | str) -> Any:
    """A plan, or a part of one, with its tensors on a device."""
    if isinstance(values, torch.Tensor):
        return values.to(device)
    if isinstance(values, tuple):
        return tuple(moved(value, device) for value in values)
    if dataclasses.is_dataclass(values) and not isinstance(values, CacheGroup | type) and hasattr(values, "__dict__"):
        changed = {field.name: moved(vars(values)[field.name], device) for field in dataclasses.fields(values)}
        return dataclasses.replace(values, **changed)
    return values


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float().cpu(), want.float().cpu(), atol=tolerance, rtol=tolerance, equal_nan=True)


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def nan(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def check_attention(seed: int, phase: Phase, shape: Shape, device: str) -> None:
    """Cache write and paged attention."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plan = random_plan(rng, GroupKind.ATTENTION, phase, shape)
    group = plan.groups[0]
    assert isinstance(group, PagedPlan)
    blocks, tokens = group.group.num_kernel_blocks, plan.sizes.padded_tokens
    buffer = nan(blocks, 2, shape.kv_heads, shape.page, shape.head_dim, dtype=shape.dtype)
    for row, prior in enumerate(plan.shared.prior_len.tolist()):
        for position in range(prior):
            block = int(group.block_table[row, position // shape.page])
            if block >= 0:
                values = normal(2, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
                buffer[block, :, :, position % shape.page] = values
    # [heads, T, D] transposed, as transformers hands them over.
    key, value = (normal(shape.kv_heads, tokens, shape.head_dim, dtype=shape.dtype).transpose(0, 1) for _ in range(2))
    query = normal(shape.kv_heads * shape.heads_per_kv, tokens, shape.head_dim, dtype=shape.dtype).transpose(0, 1)

    there = moved(plan, device)
    on_device = buffer.to(device, copy=True)
    pages = KVPages(on_device[:, 0], on_device[:, 1])
    triton_cache_write.write_kv(pages, key.to(device), value.to(device), there.groups[0].slot)
    for token, slot in enumerate(group.slot.tolist()):
        if slot >= 0:
            buffer[slot // shape.page, 0, :, slot % shape.page] = key[token]
            buffer[slot // shape.page, 1, :, slot % shape.page] = value[token]
    torch.testing.assert_close(on_device.cpu(), buffer, atol=0, rtol=0, equal_nan=True)

    scale = shape.head_dim**-0.5
    out = triton_attention.paged_attention(query.to(device), pages, there.groups[0], there.shared, there.sizes, scale)
    exact = KVPages(buffer[:, 0].float(), buffer[:, 1].float())
    want = paged_attention_reference(query.float(), exact, group, plan.shared, scale)
    assert_close(out, want, shape.dtype)
    assert bool((out[int(plan.shared.query_start[-1]) :] == 0).all())


def check_convolution(seed: int, phase: Phase, shape: Shape, device: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plan = random_plan(rng, GroupKind.STATE, phase, shape)
    group = plan.groups[0]
    assert isinstance(group, StatePlan)
    history = shape.width - 1
    conv = nan(group.group.num_blocks, history + 2, shape.channels, dtype=shape.dtype)[:, :history]
    for slot in group.state_read.tolist():
        if slot >= 0:
            conv[slot] = normal(history, shape.channels, dtype=shape.dtype)
    x = normal(plan.sizes.padded_tokens, shape.channels, dtype=shape.dtype)
    weight = normal(shape.channels, shape.width, dtype=shape.dtype)
    bias = rng.choice((None, normal(shape.channels, dtype=shape.dtype)))
    silu = rng.random() < 0.5

    there, on_device = moved(plan, device), conv.to(device, copy=True)
    out = triton_causal_conv.causal_conv(
        x.to(device),
        weight.to(device),
        None if bias is None else bias.to(device),
        on_device,
        there.groups[0],
        there.shared,
        silu,
    )
    states = conv.float()
    exact_bias = None if bias is None else bias.float()
    want = causal_conv_reference(x.float(), weight.float(), exact_bias, states, group, plan.shared)
    assert_close(out, torch.nn.functional.silu(want) if silu else want, shape.dtype)
    assert_close(on_device, states, shape.dtype)


Rule = Callable[..., torch.Tensor]


def check_gated_delta(
    seed: int,
    phase: Phase,
    shape: Shape,
    device: str,
    *,
    state_dtype: torch.dtype = torch.float32,
    rule: Rule = triton_gated_delta.recurrent_gated_delta,
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plan = random_plan(rng, GroupKind.STATE, phase, shape)
    group = plan.groups[0]
    assert isinstance(group, StatePlan)
    blocks, tokens = group.group.num_blocks, plan.sizes.padded_tokens
    recurrent = nan(blocks, shape.value_heads, shape.value_dim, shape.key_dim + 8, dtype=state_dtype)
    recurrent = recurrent[..., : shape.key_dim]
    for slot in group.state_read.tolist():
        if slot >= 0:
            recurrent[slot] = normal(shape.value_heads, shape.value_dim, shape.key_dim, dtype=state_dtype)
    # Side by side, as the convolution leaves them.
    keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    mixed = normal(tokens, 2 * keys + values, dtype=shape.dtype)
    beta = torch.rand(tokens, shape.value_heads).to(shape.dtype)
    a_log, dt_bias = torch.rand(shape.value_heads), torch.randn(shape.value_heads)
    a = normal(tokens, shape.value_heads, dtype=shape.dtype)
    is_raw = rng.random() < 0.5

    def inputs(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = mixed.split([keys, keys, values], dim=-1)
        by_head = (-1, shape.key_dim)
        return query.unflatten(-1, by_head), key.unflatten(-1, by_head), value.unflatten(-1, (-1, shape.value_dim))

    there, on_device = moved(plan, device), recurrent.to(device, copy=True)
    raw = Decay(a.to(device), a_log.to(device), dt_bias.to(device))
    decay = raw if is_raw else raw.computed()
    out = rule(*inputs(mixed.to(device)), decay, beta.to(device), on_device, there.groups[0], there.shared, there.sizes)
    states = recurrent.float()
    exact_decay = Decay(a, a_log, dt_bias).computed()
    want = gated_delta_reference(*inputs(mixed.float()), exact_decay, beta.float(), states, group, plan.shared)
    dtype = max(shape.dtype, state_dtype, key=lambda dtype: TOLERANCE[dtype])
    assert_close(out, want, dtype)
    assert_close(on_device, states, dtype)
    assert bool((out[int(plan.shared.query_start[-1]) :] == 0).all())


def check_delta_decode(seed: int, shape: Shape, device: str, *, state_dtype: torch.dtype = torch.float32) -> None:
    """Convolution, delta rule and gated norm of decode in one launch, against the three one after the other."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plan = random_plan(rng, GroupKind.STATE, Phase.DECODE, shape)
    group = plan.groups[0]
    assert isinstance(group, StatePlan)
    blocks, tokens, history = group.group.num_blocks, plan.sizes.padded_tokens, shape.width - 1
    keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    recurrent = nan(blocks, shape.value_heads, shape.value_dim, shape.key_dim + 8, dtype=state_dtype)
    recurrent = recurrent[..., : shape.key_dim]
    conv = nan(blocks, history + 2, 2 * keys + values, dtype=shape.dtype)[:, :history]
    for slot in group.state_read.tolist():
        if slot >= 0:
            recurrent[slot] = normal(shape.value_heads, shape.value_dim, shape.key_dim, dtype=state_dtype)
            conv[slot] = normal(history, 2 * keys + values, dtype=shape.dtype)
    # Interleaved by key head, as one projection of Qwen3-Next gives them.
    per_key = [shape.key_dim, shape.key_dim, values // shape.key_heads, values // shape.key_heads]
    query, key, value, gate = normal(tokens, shape.key_heads, sum(per_key), dtype=shape.dtype).split(per_key, dim=-1)
    value, gate = (part.reshape(tokens, -1, shape.value_dim) for part in (value, gate))
    a, b = (normal(tokens, shape.value_heads, dtype=shape.dtype) for _ in range(2))
    weights = DeltaWeights(
        conv=normal(2 * keys + values, shape.width, dtype=shape.dtype),
        conv_bias=rng.choice((None, normal(2 * keys + values, dtype=shape.dtype))),
        A_log=torch.rand(shape.value_heads),
        dt_bias=torch.randn(shape.value_heads),
        norm=normal(shape.value_dim, dtype=shape.dtype),
        norm_eps=1e-2,  # not so small that the norm of a small output shows its rounding
        beta_scale=rng.choice((1.0, 2.0)),
    )

    there, slots = moved(plan, device), moved(StateSlots(recurrent.clone(), conv.clone()), device)
    inputs = (part.to(device) for part in (query, key, value, gate, a, b))
    out = triton_delta_decode.delta_decode(*inputs, moved(weights, device), slots, there.groups[0], there.shared)

    mixed = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1).float()
    states, conv_states = recurrent.float(), conv.float()
    bias = None if weights.conv_bias is None else weights.conv_bias.float()
    mixed = causal_conv_reference(mixed, weights.conv.float(), bias, conv_states, group, plan.shared)
    q, k, v = torch.nn.functional.silu(mixed).split([keys, keys, values], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in ((q, shape.key_dim), (k, shape.key_dim), (v, shape.value_dim)))
    decay = Decay(a, weights.A_log, weights.dt_bias).computed()
    rate = weights.beta_scale * b.float().sigmoid()
    want = gated_delta_reference(q, k, v, decay, rate, states, group, plan.shared)
    want = gated_norm_reference(want, weights.norm.float(), weights.norm_eps, gate.float())
    dtype = max(shape.dtype, state_dtype, key=lambda dtype: TOLERANCE[dtype])
    assert_close(out, want, dtype)
    assert_close(slots.recurrent, states, dtype)
    assert_close(slots.conv, conv_states, shape.dtype)
    assert bool((out[int(plan.shared.query_start[-1]) :] == 0).all())


def check_few_rows_linear(
    seed: int, rows: int, widths: tuple[int, ...], in_features: int, dtype: torch.dtype, device: str
) -> None:
    """Few rows times weights in one launch, twice on the same counters, which it leaves at zero: the exact products,
    and the numbers that each weight's own launch gives."""
    assert triton_linear.serves_together(rows, widths, in_features)
    torch.manual_seed(seed)
    weights = tuple((torch.randn(width, in_features) / in_features**0.5).to(dtype).to(device) for width in widths)
    biases = tuple(normal(width, dtype=dtype).to(device) if (seed + width) % 2 else None for width in widths)
    arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
    for _ in range(2):
        x = normal(rows, 1, in_features, dtype=dtype).to(device).transpose(0, 1)
        outs = triton_linear.few_rows_linear(x, weights, biases, arrived)
        for out, weight, bias in zip(outs, weights, biases, strict=True):
            want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            assert out.shape == want.shape
            assert_close(out, want, dtype)
            assert torch.equal(out, triton_linear.few_rows_linear(x, (weight,), (bias,), arrived)[0])
        assert not arrived.any()
