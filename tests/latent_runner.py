"""A latent-attention model on hand-made steps: blocks of each row dealt out at random, caches full of NaN before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from stepbind.bind import bind
from stepbind.caches import Caches, LatentPages, LatentSpec
from stepbind.groups import GroupKind
from stepbind.layers import discover_layers, group_layers
from stepbind.plan import build_plan, make_arena
from stepbind.step import Phase, Step, make_step


class LatentRunner:
    """Feeds rows of token ids to a model in chunks, as a host would."""

    def __init__(
        self, model: Any, ids: Sequence[torch.Tensor], *, block_size: int = 16, ratio: int = 1, seed: int = 0
    ) -> None:
        self.model, self.ids = model, ids
        self.done = [0] * len(ids)
        longest = max(len(row) for row in ids)
        columns = -(-longest // block_size)
        self.layers = discover_layers(model)
        self.groups = group_layers(
            self.layers,
            block_size=block_size,
            kernel_block_size=block_size // ratio,
            num_blocks={GroupKind.LATENT: len(ids) * columns + 3},
        )
        (group,) = self.groups
        blocks = random.Random(seed).sample(range(1, group.num_blocks), len(ids) * columns)
        self.table = torch.tensor(blocks, dtype=torch.int32).reshape(len(ids), columns)
        buffers = {}
        for layer in self.layers:
            assert isinstance(layer.spec, LatentSpec)
            shape = (group.num_kernel_blocks, group.kernel_block_size, layer.spec.elements)
            buffers[layer.index] = torch.full(shape, torch.nan, dtype=layer.spec.dtype)
        self.caches = Caches.of(self.groups, {layer.index: layer.spec for layer in self.layers}, buffers)
        for layer in self.layers:
            if (index_key := self.pages(layer.index).index_key) is not None:
                index_key.fill_(torch.nan)
        self.arena = make_arena(
            self.groups, max_rows=len(ids) + 3, max_tokens=sum(map(len, ids)) + 8, max_context=longest
        )

    def pages(self, layer: int) -> LatentPages:
        pages = self.caches[layer]
        assert isinstance(pages, LatentPages)
        return pages

    def step(self, chunk: Sequence[int], *, padding: int = 0) -> tuple[Step, list[int]]:
        """A step of the next chunk[r] tokens of each row, and the rows that have any."""
        rows = [row for row, count in enumerate(chunk) if count]
        lengths, prior = [chunk[row] for row in rows], [self.done[row] for row in rows]
        phase = Phase.DECODE if max(lengths) == 1 else Phase.PREFILL
        tables = {self.groups[0].name: self.table[rows]}
        padded = {"padded_rows": len(rows) + padding, "padded_tokens": sum(lengths) + padding}
        return make_step(self.groups, phase, lengths, prior, tables, **padded), rows

    @torch.inference_mode()
    def run(self, chunk: Sequence[int], *, padding: int = 0) -> dict[int, torch.Tensor]:
        """Logits [tokens, vocabulary] of the next chunk[r] tokens of each row that has any."""
        step, rows = self.step(chunk, padding=padding)
        flat = torch.cat([self.ids[row][self.done[row] : self.done[row] + chunk[row]] for row in rows])
        logits = self.forward(step, torch.nn.functional.pad(flat, (0, padding)))
        assert logits.isfinite().all()
        for row in rows:
            self.done[row] += chunk[row]
        return dict(zip(rows, logits[: len(flat)].split([chunk[row] for row in rows]), strict=True))

    @torch.inference_mode()
    def forward(self, step: Step, flat_ids: torch.Tensor) -> torch.Tensor:
        plan = build_plan(step, self.arena)
        with bind(plan, self.caches, self.model):
            out = self.model(flat_ids[None], position_ids=plan.shared.position[None], use_cache=False)
        logits: torch.Tensor = out.logits[0]
        return logits


def random_ids(lengths: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


@torch.inference_mode()
def logits_alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """transformers' own logits [tokens, vocabulary] of one row, in one forward."""
    logits: torch.Tensor = model(ids[None], use_cache=False).logits[0]
    return logits
