"""RTP's loop around a Python model: the local scheduler decides, RTP's structures carry it over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stepbind.caches import StateSpec
from stepbind.groups import CacheGroup, GroupKind
from stepbind.hosts.local.blocks import BlockManager
from stepbind.hosts.local.memory import allocate_buffers
from stepbind.hosts.local.poison import Poison
from stepbind.hosts.local.request import SamplingParams
from stepbind.hosts.local.request import Sequence as Request
from stepbind.hosts.local.scheduler import Scheduler
from stepbind.layers import Layer
from stepbind.step import Phase
from tests.hosts.rtp_double.caches import kv_cache
from tests.hosts.rtp_double.graphs import GraphRunner
from tests.hosts.rtp_double.inputs import InitResources, Layout, Row, model_inputs, probe_inputs


def host_groups(
    layers: Sequence[Layer], count: int, block_size: int, kernel_block_size: int, num_blocks: int
) -> tuple[CacheGroup, ...]:
    """The model's layers in `count` groups, each of one kind, as evenly as they divide; count 1: all in one group,
    whatever their kinds."""
    if count == 1:
        kind = next(layer.kind for layer in layers if layer.kind is not GroupKind.STATE)
        everything = tuple(layer.index for layer in layers)
        return (CacheGroup("all", kind, everything, block_size, kernel_block_size, num_blocks),)
    members = {kind: [layer.index for layer in layers if layer.kind is kind] for kind in GroupKind}
    parts = {kind: min(len(numbers), 1) for kind, numbers in members.items()}
    while sum(parts.values()) < count:  # split the kind whose groups have most layers
        largest = max(GroupKind, key=lambda kind: len(members[kind]) / parts[kind] if parts[kind] else 0)
        parts[largest] += 1
    return tuple(
        CacheGroup(
            f"{kind.value}{part}",
            kind,
            tuple(members[kind][part :: parts[kind]]),
            block_size,
            kernel_block_size,
            num_blocks,
        )
        for kind in GroupKind
        for part in range(parts[kind])
    )


def allocate(layers: Sequence[Layer], groups: tuple[CacheGroup, ...], device: str = "cpu") -> dict[int, torch.Tensor]:
    """Raw buffers by layer; a group of several kinds has as many blocks in each."""
    buffers = {}
    for group in groups:
        for kind in GroupKind:
            members = [layer for layer in layers if layer.index in group.layers and layer.kind is kind]
            if members:
                numbers = tuple(layer.index for layer in members)
                part = CacheGroup("part", kind, numbers, group.block_size, group.kernel_block_size, group.num_blocks)
                buffers |= allocate_buffers(members, (part,), torch.device(device))
    return buffers


class RtpDouble:
    """Serves greedily with a `StepbindRuntime`. `graph_sizes`: batch sizes to capture decode for; none: eager."""

    def __init__(
        self,
        runtime: Any,
        layers: Sequence[Layer],
        groups: tuple[CacheGroup, ...],
        generation: str,
        *,
        token_budget: int,
        max_rows: int,
        max_context: int,
        graph_sizes: Sequence[int] = (),
        keep_state_every: int = 0,
        device: str = "cpu",
    ) -> None:
        self.runtime = runtime
        self.layout = Layout(groups, generation, len(layers), device=device)
        buffers = allocate(layers, groups, device)
        is_mixed = len({layer.kind for layer in layers}) > len({group.kind for group in groups})
        self.poison = None if is_mixed else Poison(groups, buffers)
        runtime.initialize(InitResources(kv_cache(generation, groups, buffers)))
        runtime.forward(probe_inputs(self.layout, 2), runtime.prepare_fmha_impl(None))
        self.scheduler = Scheduler(
            BlockManager(groups, keep_state_every),
            max_rows=max_rows,
            token_budget=token_budget,
            max_context=max_context,
        )
        self.graphs = GraphRunner(runtime, self.layout, graph_sizes, max_context) if graph_sizes else None

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new_tokens)
        requests = [Request(i, len(prompt), list(prompt), params) for i, prompt in enumerate(prompts)]
        for request in requests:
            self.scheduler.add(request)
        while (batch := self.scheduler.schedule()) is not None:
            rows = [
                Row(each.tokens[each.computed : each.computed + count], each.computed, each.tables)
                for each, count in zip(batch.sequences, batch.query_len, strict=True)
            ]
            finishing = batch.finishing()
            if self.poison is not None:
                self.poison.before(self.scheduler.running)
            hidden = self.forward(batch.phase, rows)
            if self.poison is not None:
                self.poison.after()
            ends = torch.tensor([len(row.tokens) for row in rows]).cumsum(0) - 1
            tokens = self.logits(hidden[ends[finishing]]).argmax(dim=-1).tolist()
            self.scheduler.done(batch)
            for row, token in zip(finishing, tokens, strict=True):
                request = batch.sequences[row]
                request.tokens.append(token)
                if len(request.tokens) - request.prompt_len == new_tokens:
                    self.scheduler.remove(request)
        return [request.tokens[request.prompt_len :] for request in requests]

    def forward(self, phase: Phase, rows: Sequence[Row]) -> torch.Tensor:
        """Hidden states [T, hidden size] of a pass, replayed where a graph fits."""
        if self.graphs is not None and phase is self.graphs.phase and len(rows) <= self.graphs.sizes[-1]:
            return self.graphs.replay(rows)
        inputs = model_inputs(self.layout, phase, rows)
        return self.runtime.forward(inputs, self.runtime.prepare_fmha_impl(inputs)).hidden_states  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The host's LM head, with the weights that the model handed over."""
        return hidden @ self.runtime.weight.global_weights["lm_head"].T


def state_layers(layers: Sequence[Layer]) -> list[int]:
    return [layer.index for layer in layers if isinstance(layer.spec, StateSpec)]
