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
FILLS = [False] if torch.cuda.is_available() else [False, True]
"""Values of `build_plan`'s `triton` on the CPU: Triton's interpreter runs where there is no GPU."""


@cache
def hybrid(layers: int = 2) -> Any:
    """Recurrent and attention layers in turn."""
    layer_types = ["linear_attention", "full_attention"] * (layers // 2)
    return tiny_model("qwen3_5", num_hidden_layers=layers, layer_types=layer_types)


class HandMade:
    """Memory of the hybrid's groups, all NaN at first, and passes over it with tables given by the test. `groups`: one
    of each kind where not given, else with a layer number for each layer of the hybrid."""

    def __init__(
        self, attention_block: int = 8, state_block: int = 8, *, groups: tuple[CacheGroup, ...] | None = None
    ) -> None:
        self.groups = groups or (
            CacheGroup("attention", GroupKind.ATTENTION, (1,), attention_block, attention_block, NUM_BLOCKS),
            CacheGroup("state", GroupKind.STATE, (0,), state_block, state_block, NUM_BLOCKS),
        )
        self.model = hybrid(sum(len(group.layers) for group in self.groups))
        self.layers = discover_layers(self.model)
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
        tables = {"attention": attention, "state": state}
        return self.run_on(
            tables, rows, prior, phase=phase, padded_rows=padded_rows, padded_tokens=padded_tokens, strict=strict
        )

    @torch.no_grad()
    def run_on(
        self,
        tables: dict[str, list[list[int]]],
        rows: list[list[int]],
        prior: list[int],
        *,
        phase: Phase = Phase.PREFILL,
        padded_rows: int = 0,
        padded_tokens: int = 0,
        strict: bool | None = None,
    ) -> tuple[torch.Tensor, Plan]:
        """`run` with a table for each group, by name."""
        step = make_step(
            self.groups,
            phase,
            [len(row) for row in rows],
            prior,
            {name: torch.tensor(blocks, dtype=torch.int32) for name, blocks in tables.items()},
            padded_rows=padded_rows,
            padded_tokens=padded_tokens,
        )
        plan = build_plan(step, self.arena, strict=strict)
        flat = [token for row in rows for token in row]
        ids = torch.tensor(flat + [0] * (step.padded_tokens - len(flat)))
        return self.forward(plan, ids), plan

    @torch.no_grad()
    def forward(self, plan: Plan, ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocabulary] of token ids [T] on a plan."""
        with adapted(self.model), bind(plan, self.caches, self.model):
            position = plan.shared.position[None]
            return self.model(ids[None], position_ids=position, use_cache=False).logits[0]  # type: ignore[no-any-return]

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
