"""The Python model that RTP-LLM calls for every pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from rtp_llm.models_py.model_desc.module_base import GptModelBase
from rtp_llm.ops.compute_ops import PyModelOutputs

from stepbind.hosts.rtp_llm.binding import RtpBinding
from stepbind.hosts.rtp_llm.steps import StepOptions
from stepbind.models.adapt import adapted
from stepbind.models.experts import capturable_experts


class PassHandle:
    """What `prepare_fmha_impl` returns: RTP keeps the one of a capture and calls it before each replay.

    Nothing has to be prepared there: the captured pass computes its plan from what RTP refreshes.
    """

    fmha_params = None

    def __init__(self, binding: RtpBinding, is_cuda_graph: bool) -> None:
        self._binding = binding
        self.is_cuda_graph = is_cuda_graph

    def prepare_cuda_graph(self, attention_inputs: Any) -> None:
        """Raises `StepError` for a row longer than the captured pass takes."""
        self._binding.check_replay(attention_inputs)


class StepbindRuntime(GptModelBase):  # type: ignore[misc]
    """A transformers model on RTP's cache.

    `causal_model` is the model with its LM head; RTP applies the head itself, to the hidden states returned here.
    It stays adapted until `close()`, which in RTP's process nobody needs to call.
    """

    def __init__(
        self,
        config: Any,
        parallelism_config: Any,
        weight: Any,
        max_generate_batch_size: int,
        *,
        causal_model: Any,
        options: StepOptions | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(config, parallelism_config, weight, max_generate_batch_size, **rest)
        self.causal_model = causal_model
        self._binding = RtpBinding(
            causal_model, max_rows=max_generate_batch_size, max_context=config.max_seq_len, options=options
        )
        self._pool: torch.cuda.MemPool | None = None
        self._scopes = ExitStack()
        self._scopes.enter_context(adapted(causal_model))

    def close(self) -> None:
        """Give the model back as plain transformers. Raises `BlockFaultError` for faults of the last passes."""
        self._scopes.close()
        self._binding.check_faults()

    def initialize(self, init_resource: Any) -> bool:
        """Take the cache that RTP allocated; it may be none yet."""
        done = bool(super().initialize(init_resource))
        self._binding.initialize(init_resource.kv_cache)
        return done

    def prepare_fmha_impl(self, inputs: Any, is_cuda_graph: bool = False) -> PassHandle:
        """Called before a pass; before a capture it makes the buffers that the captured pass works in."""
        if is_cuda_graph:
            self._binding.prepare_capture(inputs)
        return PassHandle(self._binding, is_cuda_graph)

    @torch.inference_mode()
    def forward(self, inputs: Any, fmha_impl: PassHandle | None = None) -> Any:
        """`PyModelOutputs` of one pass: hidden states [T, hidden size]. Raises `StepError` as `RtpBinding.bind`."""
        is_graph = fmha_impl is not None and fmha_impl.is_cuda_graph
        with self._captured() if is_graph else nullcontext(), self._binding.bind(inputs, is_graph=is_graph) as context:
            out = self.causal_model.get_decoder()(
                **_tokens(inputs), position_ids=context.plan.shared.position[None], use_cache=False
            )
        return PyModelOutputs(out.last_hidden_state[0])

    @contextmanager
    def _captured(self) -> Iterator[None]:
        """A pass that is captured, or its warm-up: memory that nobody else gets later, since RTP does not capture
        through torch's own graph pool, and experts that a capture can hold."""
        with ExitStack() as scopes:
            if next(self.causal_model.parameters()).is_cuda:
                self._pool = self._pool or torch.cuda.MemPool()
                scopes.enter_context(torch.cuda.use_mem_pool(self._pool))
            scopes.enter_context(capturable_experts(self.causal_model))
            yield


def _tokens(inputs: Any) -> dict[str, torch.Tensor]:
    if inputs.input_ids is not None and inputs.input_ids.numel():
        return {"input_ids": inputs.input_ids[None].long()}
    return {"inputs_embeds": inputs.input_hiddens[None]}
