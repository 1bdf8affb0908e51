"""Two ranks of transformers' tensor parallelism, each on a cache of its own heads, equal the whole model."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing
from transformers import AutoModelForCausalLM

from stepbind.groups import CacheGroup, GroupKind
from stepbind.hosts.rtp_llm import RtpBinding
from stepbind.layers import discover_layers
from stepbind.models.adapt import adapted
from stepbind.step import Phase
from stepbind.tiny import save_tiny, tiny_model
from tests.hosts.rtp_double.caches import kv_cache
from tests.hosts.rtp_double.host import allocate
from tests.hosts.rtp_double.inputs import Layout, Row, model_inputs

TOKENS = list(range(3, 14))


def rank_logits(rank: int, checkpoint: str, out: str) -> None:
    """One rank: prefill in two passes, then a decode; its logits go to a file."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=2)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, tp_plan="auto").eval()
    layers = discover_layers(model)
    groups = (CacheGroup("full", GroupKind.ATTENTION, tuple(layer.index for layer in layers), 4, 4, 9),)
    buffers = allocate(layers, groups)
    assert {buffer.shape[2] for buffer in buffers.values()} == {1}  # one of two KV heads
    binding = RtpBinding(model, max_rows=2, max_context=64)
    binding.initialize(kv_cache("newer", groups, buffers))
    parts = []
    for start, stop, phase in ((0, 6, Phase.PREFILL), (6, 10, Phase.PREFILL), (10, 11, Phase.DECODE)):
        inputs = model_inputs(
            Layout(groups, "newer", len(layers)), phase, [Row(TOKENS[start:stop], start, [[2, 3, 4]])]
        )
        with torch.no_grad(), adapted(model), binding.bind(inputs) as context:
            position = context.plan.shared.position[None]
            parts.append(model(inputs.input_ids[None], position_ids=position, use_cache=False).logits[0])
    torch.save(torch.cat(parts), f"{out}.{rank}")
    torch.distributed.destroy_process_group()


def test_two_ranks_equal_the_whole_model(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "checkpoint")
    out = tmp_path / "logits"
    torch.multiprocessing.spawn(rank_logits, (str(tmp_path / "checkpoint"), str(out)), nprocs=2)
    with torch.no_grad():
        want = tiny_model("llama")(torch.tensor([TOKENS]), use_cache=False).logits[0]
    for rank in range(2):
        torch.testing.assert_close(torch.load(f"{out}.{rank}"), want, atol=1e-3, rtol=0)
