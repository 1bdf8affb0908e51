"""Prefill attention over the pass's own keys: a stand-in for the library, random passes, and what must hold of both."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from stepbind.caches import KVPages
from stepbind.groups import CacheGroup, GroupKind
from stepbind.ops import varlen_attention
from stepbind.ops.cache_write import write_kv
from stepbind.ops.reference import paged_attention_reference
from stepbind.plan import PagedPlan, Plan, build_plan, make_arena
from stepbind.step import Phase, make_step
from tests.op_checks import Shape, assert_close, moved, nan, normal


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """torch's varlen attention, as its documentation describes it, on any device: tokens of no row stay unwritten."""
    assert window_size == (-1, 0)
    out = torch.full_like(query, torch.nan)
    heads_per_kv = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(heads_per_kv, dim=1).float() for each in (key, value))
    for row in range(cu_seq_q.numel() - 1):
        new, old = (slice(int(start[row]), int(start[row + 1])) for start in (cu_seq_q, cu_seq_k))
        assert new.stop - new.start <= max_q
        assert old.stop - old.start <= max_k
        scores = torch.einsum("qhd,khd->hqk", query[new].float(), key[old]) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        out[new] = torch.einsum("hqk,khd->qhd", weights, value[old]).to(query.dtype)
    return out


@dataclass(frozen=True, eq=False)
class Pass:
    """A prefill without prior context. bad: its plan where the table has entries that lead to no block or to a block
    outside the pool. Tensors are on the CPU."""

    plan: Plan
    bad: Plan
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float

    def pages(self) -> KVPages:
        """Empty ones."""
        group = self.plan.groups[0].group
        _, heads, dim = self.key.shape
        shape = (group.num_kernel_blocks, 2, heads, group.kernel_block_size, dim)
        return KVPages(*nan(*shape, dtype=self.key.dtype).unbind(1))


def random_pass(seed: int, shape: Shape) -> Pass:
    """Rows of different lengths, and some rows (but no tokens) of padding."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = rng.randint(1, 5)
    query = [rng.randint(1, shape.longest) for _ in range(rows)]
    columns = -(-max(query) // shape.page)
    group = CacheGroup("group", GroupKind.ATTENTION, (0,), shape.page, shape.page, rows * columns + 1)
    table = (torch.randperm(rows * columns, dtype=torch.int32) + 1).reshape(rows, columns)
    spoiled = table.clone()
    spoiled[rng.randrange(rows), 0] = rng.choice((-1, 0, rows * columns + 1, 2**31 - 1))
    padded_rows = rows + rng.choice((0, 2))

    def plan(blocks: torch.Tensor) -> Plan:
        step = make_step([group], Phase.PREFILL, query, [0] * rows, {"group": blocks}, padded_rows=padded_rows)
        arena = make_arena([group], max_rows=8, max_tokens=step.padded_tokens, max_context=step.max_context)
        return build_plan(step, arena, strict=False, triton=False)

    def heads(count: int) -> torch.Tensor:
        """[heads, T, D] transposed, as transformers hands them over."""
        return normal(count, sum(query), shape.head_dim, dtype=shape.dtype).transpose(0, 1)

    attention_heads, kv_heads = shape.kv_heads * shape.heads_per_kv, shape.kv_heads
    tensors = heads(attention_heads), heads(kv_heads), heads(kv_heads)
    return Pass(plan(table), plan(spoiled), *tensors, shape.head_dim**-0.5)


def check_varlen_attention(seed: int, shape: Shape, device: str) -> None:
    """It equals the reference of paged attention."""
    given = random_pass(seed, shape)
    group = given.plan.groups[0]
    assert isinstance(group, PagedPlan)
    pages = given.pages()
    write_kv(pages, given.key, given.value, group.slot)
    exact = KVPages(pages.key.float(), pages.value.float())
    want = paged_attention_reference(given.query.float(), exact, group, given.plan.shared, given.scale)
    inputs = [each.to(device) for each in (given.query, given.key, given.value)]
    out = varlen_attention.varlen_attention(*inputs, moved(given.plan.shared, device), given.plan.sizes, given.scale)
    assert_close(out, want, shape.dtype)
