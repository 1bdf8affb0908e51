"""A model on hand-made tables, pass by pass, so that a test decides which block is whose."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from stepbind import (
    Caches,
    GroupKind,
    Phase,
    Plan,
    adapted,
    bind,
    build_plan,
    discover_layers,
    make_arena,
    make_step,
)
from stepbind.groups import CacheGroup
from stepbind.hosts.local.memory import allocate_buffers
from stepbind.tiny import tiny_model

NUM_BLOCKS = 24


@cache
def hybrid() -> Any:
    """One recurrent and one attention layer."""
    layer_types = ["linear_attention", "full_attention"]
    return tiny_model("qwen3_5", num_hidden_layers=2, layer_types=layer_types)


class HandMade:
    """Memory of the hybrid's two groups, all NaN at first, and passes over it with tables given by the test."""

    def __init__(self, attention_block: int = 8, state_block: int = 8) -> None:
        self.model = hybrid()
        self.layers = discover_layers(self.model)
        self.groups = (
            CacheGroup("attention", GroupKind.ATTENTION, (1,), attention_block, attention_block, NUM_BLOCKS),
            CacheGroup("state", GroupKind.STATE, (0,), state_block, state_block, NUM_BLOCKS),
        )
        self.buffers = allocate_buffers(self.layers, self.groups, torch.device("cpu"))
        for buffer in self.buffers.values():
            buffer.view(torch.int8).fill_(-1)
        self.caches = Caches.of(self.groups, {layer.index: layer.spec for layer in self.layers}, self.buffers)
        self.arena = make_arena(self.groups, max_rows=8, max_tokens=64, max_context=128)

    @torch.no_grad()
    def run(
        self,
        rows: list[list[int]],
        prior: list[int],
        attention: list[list[int]],
        state: list[list[int]],
        *,
        phase: Phase = Phase.PREFILL,
        padded_rows: int = 0,
        padded_tokens: int = 0,
        strict: bool | None = None,
    ) -> tuple[torch.Tensor, Plan]:
        """One pass over the rows' new tokens: logits [padded tokens, vocabulary] and the plan."""
        tables = {
            "attention": torch.tensor(attention, dtype=torch.int32),
            "state": torch.tensor(state, dtype=torch.int32),
        }
        step = make_step(
            self.groups,
            phase,
            [len(row) for row in rows],
            prior,
            tables,
            padded_rows=padded_rows,
            padded_tokens=padded_tokens,
        )
        plan = build_plan(step, self.arena, strict=strict)
        flat = [token for row in rows for token in row]
        ids = torch.tensor([flat + [0] * (step.padded_tokens - len(flat))])
        with adapted(self.model), bind(plan, self.caches, self.model):
            logits = self.model(ids, position_ids=plan.shared.position[None], use_cache=False).logits
        return logits[0], plan

    def block_bytes(self, layer: int, block: int) -> bytes:
        buffer = self.buffers[layer].view(torch.uint8).reshape(NUM_BLOCKS, -1)
        return bytes(buffer[block].tolist())

    def all_bytes(self) -> list[bytes]:
        return [self.block_bytes(layer, block) for layer in self.buffers for block in range(NUM_BLOCKS)]

    @torch.no_grad()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        """transformers' own logits [tokens, vocabulary] of one sequence."""
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0]  # type: ignore[no-any-return]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
