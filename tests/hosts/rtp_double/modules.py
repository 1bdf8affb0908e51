"""The module tree `rtp_llm`, as far as an external model package imports it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.hosts.rtp_double.inputs import ModelOutputs


class ModelConfig:
    """Nested fields that RTP's C++ side reads."""

    def __init__(self) -> None:
        self.attn_config = SimpleNamespace(use_mla=False)
        self.hybrid_attention_config = SimpleNamespace(enable_hybrid_attention=False, hybrid_attention_types=[])
        self.linear_attention_config = SimpleNamespace()


class ModelWeights:
    def __init__(self, num_layers: int, device: str, dtype: torch.dtype) -> None:
        self.global_weights: dict[str, torch.Tensor] = {}

    def set_global_weight(self, name: str, tensor: torch.Tensor) -> None:
        self.global_weights[name] = tensor


class ModelDeployWeightInfo:
    pass


class HybridAttentionType(Enum):
    NONE = 0
    LINEAR = 1


class W:
    lm_head = "lm_head"
    embedding = "embedding"
    final_ln_gamma = "final_layernorm.gamma"


class GptModelBase(nn.Module):
    def __init__(
        self,
        config: Any,
        parallelism_config: Any,
        weight: ModelWeights,
        max_generate_batch_size: int,
        fmha_config: Any = None,
        py_hw_kernel_config: Any = None,
        device_resource_config: Any = None,
    ) -> None:
        super().__init__()
        self.config, self.weight = config, weight
        self.kv_cache: Any = None

    def initialize(self, init_resource: Any) -> bool:
        self.kv_cache = init_resource.kv_cache
        return True


class BaseModel:
    def __init__(self, model_config: Any, max_generate_batch_size: int, tp_size: int = 1) -> None:
        self.model_config = model_config
        self.parallelism_config = SimpleNamespace(tp_size=tp_size, local_rank=0)
        self.max_generate_batch_size = max_generate_batch_size
        self.fmha_config = self.hw_kernel_config = self.device_resource_config = None

    def _get_device_str(self) -> str:
        return "cpu"

    @classmethod
    def create_config(cls, ckpt_path: str) -> ModelConfig:
        return cls._create_config(ckpt_path)  # type: ignore[attr-defined,no-any-return]


def _modules(registered: dict[str, Any]) -> dict[str, dict[str, Any]]:
    def register_model(name: str, model: Any, architectures: list[str] | None = None) -> None:
        registered[name] = model

    return {
        "rtp_llm": {},
        "rtp_llm.config": {},
        "rtp_llm.config.model_config": {"ModelConfig": ModelConfig},
        "rtp_llm.model_factory_register": {"register_model": register_model},
        "rtp_llm.model_loader": {},
        "rtp_llm.model_loader.model_weight_info": {
            "ModelDeployWeightInfo": ModelDeployWeightInfo,
            "ModelWeights": ModelWeights,
        },
        "rtp_llm.models": {},
        "rtp_llm.models.base_model": {"BaseModel": BaseModel},
        "rtp_llm.models_py": {},
        "rtp_llm.models_py.model_desc": {},
        "rtp_llm.models_py.model_desc.module_base": {"GptModelBase": GptModelBase},
        "rtp_llm.ops": {"HybridAttentionType": HybridAttentionType},
        "rtp_llm.ops.compute_ops": {"PyModelOutputs": ModelOutputs},
        "rtp_llm.utils": {},
        "rtp_llm.utils.model_weight": {"W": W},
    }


PACKAGE = "stepbind.hosts.rtp_llm.models"


@contextmanager
def rtp_llm_installed() -> Iterator[dict[str, Any]]:
    """`rtp_llm` importable, and the external package imported as RTP imports it. Yields what was registered."""
    registered: dict[str, Any] = {}
    names = _modules(registered)
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    try:
        __import__(PACKAGE)
        yield registered
    finally:
        for name in [*names, *(name for name in sys.modules if name.startswith(PACKAGE))]:
            sys.modules.pop(name, None)
