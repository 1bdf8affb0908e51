"""RTP's passes over a hybrid of two layers, with rows and tables given by a test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from stepbind.groups import CacheGroup, GroupKind
from stepbind.hosts.rtp_llm import RtpBinding, StepOptions
from stepbind.layers import discover_layers
from stepbind.models.adapt import adapted
from stepbind.step import Phase
from tests.hosts.rtp_double.caches import kv_cache
from tests.hosts.rtp_double.host import allocate
from tests.hosts.rtp_double.inputs import Layout, ModelInputs, Row, model_inputs
from tests.zoo.harness import hybrid

BLOCK, KERNEL = 8, 4
GROUPS = (
    CacheGroup("linear", GroupKind.STATE, (0,), BLOCK, KERNEL, 24),
    CacheGroup("full", GroupKind.ATTENTION, (1,), BLOCK, KERNEL, 24),
)


class Host:
    """RTP's side of a hybrid of two layers, all of whose memory is NaN; tables are the test's."""

    def __init__(self, generation: str, options: StepOptions | None = None) -> None:
        self.model = hybrid()
        self.layout = Layout(GROUPS, generation, 2)
        self.buffers = allocate(discover_layers(self.model), GROUPS)
        for buffer in self.buffers.values():
            buffer.view(torch.int8).fill_(-1)
        self.binding = RtpBinding(self.model, max_rows=8, max_context=128, options=options)
        self.cache = kv_cache(generation, GROUPS, self.buffers)
        self.binding.initialize(self.cache)

    def inputs(self, phase: Phase, rows: list[Row]) -> ModelInputs:
        return model_inputs(self.layout, phase, rows)

    @torch.no_grad()
    def run(self, inputs: ModelInputs, *, is_graph: bool = False) -> torch.Tensor:
        """Logits [T, vocabulary]."""
        with adapted(self.model), self.binding.bind(inputs, is_graph=is_graph) as context:
            position = context.plan.shared.position[None]
            return self.model(inputs.input_ids[None], position_ids=position, use_cache=False).logits[0]

    def forward(self, inputs: ModelInputs, handle: Any) -> SimpleNamespace:
        """As a runtime, for the graph runner."""
        return SimpleNamespace(hidden_states=self.run(inputs, is_graph=True))

    def prepare_fmha_impl(self, inputs: ModelInputs, is_cuda_graph: bool) -> SimpleNamespace:
        self.binding.prepare_capture(inputs)
        return SimpleNamespace(prepare_cuda_graph=self.binding.check_replay)


@torch.no_grad()
def expected(sequence: list[int]) -> torch.Tensor:
    return hybrid()(torch.tensor([sequence]), use_cache=False).logits[0]


def each(inputs: ModelInputs) -> list[Any]:
    """The attention inputs of each group."""
    found = inputs.attention_inputs
    return list(found.values()) if isinstance(found, dict) else [found]
