"""The model class that RTP-LLM makes from a checkpoint: configuration for its cache, weights for its LM head, and the
Python model that runs the passes."""

from __future__ import annotations

from typing import Any

import torch
from rtp_llm.config.model_config import ModelConfig
from rtp_llm.model_loader.model_weight_info import ModelDeployWeightInfo, ModelWeights
from rtp_llm.models.base_model import BaseModel
from rtp_llm.utils.model_weight import W
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from stepbind.errors import StepError
from stepbind.hosts.rtp_llm.models.config import fill_config
from stepbind.hosts.rtp_llm.models.runtime import StepbindRuntime


class _NoWeights(ModelDeployWeightInfo):  # type: ignore[misc]
    """RTP's loader loads nothing: transformers does."""

    def _get_weight_info(self) -> list[Any]:
        return []


class _Loader:
    """Stands where RTP keeps its weight loader and weight manager; both are asked for, neither is used."""

    _py_eplb = None

    def load_lora_weights(self, adapter_name: str, lora_path: str, device: str) -> None:
        raise StepError("lora", adapter_name, "no adapters: stepbind serves the checkpoint's own weights")

    def update(self, request: Any) -> None:
        raise StepError("weight update", type(request).__name__, "none: the weights stay those of the checkpoint")


class StepbindModel(BaseModel):  # type: ignore[misc]
    """Every family that stepbind knows, through transformers, on RTP's cache.

    Raises `UnknownModelError` for a checkpoint of no known family when it is loaded.
    """

    @classmethod
    def _create_config(cls, ckpt_path: str) -> Any:
        config = ModelConfig()
        config.ckpt_path = ckpt_path
        fill_config(config, AutoConfig.from_pretrained(ckpt_path).get_text_config())
        return config

    @staticmethod
    def get_weight_cls() -> type[Any]:
        return _NoWeights

    def support_cuda_graph(self) -> bool:
        """Yes: no op of a decode waits for the GPU."""
        return True

    def load(self, skip_python_model: bool = False) -> None:
        """Replaces RTP's loading: transformers reads the checkpoint, and RTP gets the weights of its LM head."""
        self.device = self._get_device_str()
        config = self.model_config
        self.weight = ModelWeights(num_layers=config.num_layers, device=self.device, dtype=config.compute_dtype)
        self.model_weights_loader = self.weight_manager = _Loader()
        self.py_eplb = None
        if not skip_python_model:
            self._create_python_model()

    def _create_python_model(self) -> StepbindRuntime:
        config = self.model_config
        model = load_model(config.ckpt_path, config.compute_dtype, self.device, self.parallelism_config.tp_size)
        hand_over_weights(self.weight, model)
        self.py_model = StepbindRuntime(
            config,
            self.parallelism_config,
            self.weight,
            self.max_generate_batch_size,
            causal_model=model,
            fmha_config=self.fmha_config,
            py_hw_kernel_config=self.hw_kernel_config,
            device_resource_config=self.device_resource_config,
        )
        return self.py_model


def load_model(checkpoint: str, dtype: torch.dtype, device: str, tp_size: int) -> Any:
    """The checkpoint's model; with tensor parallelism this rank's part of it, by transformers' own plan, which needs
    torch.distributed to be set up in the rank's process."""
    if tp_size > 1:
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, tp_plan="auto").eval()
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device).eval()


def hand_over_weights(weight: Any, model: Any) -> None:
    """Give RTP what it applies itself, on the same memory: LM head, embedding, and the last norm; this rank's parts."""
    decoder = model.get_decoder()
    for name, parameter in (
        (W.lm_head, model.get_output_embeddings().weight),
        (W.embedding, model.get_input_embeddings().weight),
        (W.final_ln_gamma, decoder.norm.weight),
    ):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        weight.set_global_weight(name, local.detach())
