"""The package that RTP-LLM loads, on the double's modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.hosts.rtp_double.inputs import ModelInputs, int32


def test_the_external_package_says_what_is_missing_without_rtp_llm() -> None:
    assert "rtp_llm" not in sys.modules
    with pytest.raises(ImportError, match=r"is loaded by RTP-LLM .* and needs its package rtp_llm"):
        __import__("stepbind.hosts.rtp_llm.models")


@pytest.fixture
def registered() -> Iterator[dict[str, Any]]:
    from tests.hosts.rtp_double.modules import rtp_llm_installed

    with rtp_llm_installed() as models:
        yield models


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3", "qwen3"])
def test_a_checkpoint_loads_as_rtp_loads_it(registered: dict[str, Any], family: str, tmp_path: Any) -> None:
    from stepbind.tiny import save_tiny

    save_tiny(family, tmp_path)
    model_class = registered["stepbind"]
    config = model_class.create_config(str(tmp_path))
    assert (config.num_layers, config.hidden_size, config.vocab_size) == ({"qwen3_5": 4}.get(family, 3), 64, 257)
    assert config.attn_config.use_mla == (family == "deepseek_v3")
    assert config.hybrid_attention_config.enable_hybrid_attention == (family == "qwen3_5")
    model = model_class(config, max_generate_batch_size=4)
    assert model.support_cuda_graph() == (family != "deepseek_v3")
    model.load()
    weights = model.weight.global_weights
    assert sorted(weights) == ["embedding", "final_layernorm.gamma", "lm_head"]
    causal = model.py_model.causal_model
    assert weights["lm_head"].data_ptr() == causal.get_output_embeddings().weight.data_ptr()
    # Before there is a cache, a pass runs and gives hidden states.
    out = model.py_model.forward(ModelInputs(int32([1, 2, 3]), None))
    assert out.hidden_states.shape == (3, 64)
    model.py_model.close()
