"""The same pass through ATOM's own bridge and through ours gives equal fields, where that bridge is at hand.

It is no part of this project: the environment variable STEPBIND_ATOM_REFERENCE says where it lies.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from stepbind.targets import atom
from tests.targets.atom_double.modules import REFERENCE, atom_installed, reference_module
from tests.targets.atom_double.passes import hybrid_model, latent_model, plain_model, random_pass, runtime_for

CLASSES = {
    "RTPForwardContext": plain_model,
    "RTPForwardMLAContext": latent_model,
    "RTPForwardQwen35HybridContext": hybrid_model,
}
OURS_ALONE = {
    "rtp_groups",
    "rtp_state_indices_in_cache",
    "non_spec_state_indices_in_tensor",
}


@pytest.fixture(scope="module")
def reference() -> Iterator[ModuleType]:
    with atom_installed():
        module = reference_module()
        if module is None:
            pytest.skip(f"{REFERENCE} names no file")
        before = vars(torch.cuda).get("is_current_stream_capturing")
        torch.cuda.is_current_stream_capturing = lambda: False  # a CPU build has none
        yield module
        torch.cuda.is_current_stream_capturing = before


def assert_same(ours: Any, theirs: Any, name: str) -> None:
    """Equal to the value, dtype and shape, through objects and containers."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), name
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        assert torch.equal(ours, theirs), name
    elif isinstance(theirs, dict):
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{name}[{key}]")
    elif isinstance(theirs, (int, float, str, type(None))):
        assert ours == theirs, name
    elif type(theirs).__name__ in ("SimpleNamespace", "GatedDeltaNet", "SparseMLA"):
        assert ours is theirs, name
    else:
        for field, value in vars(theirs).items():
            if field not in OURS_ALONE:
                assert_same(getattr(ours, field), value, f"{name}.{field}")


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("name", CLASSES)
def test_fields_are_equal(reference: ModuleType, name: str, groups: int, ratio: int) -> None:
    model = CLASSES[name]()
    for seed in range(60):
        hybrid = name.endswith("HybridContext")  # the reference's takes every table for physical blocks
        inputs, positions = random_pass(
            random.Random(seed), groups=groups if hybrid else 1, ratio=ratio, compact=hybrid
        )
        runtime, other = (runtime_for(model, 8, 8 // ratio, 100) for _ in range(2))
        other.kv_cache = runtime.kv_cache
        arguments = {"model": model, "inputs": inputs, "positions": positions, "cg_max_seq_len": 64}
        theirs = getattr(reference, name).build(runtime=other, **arguments)
        ours = getattr(atom, name).build(runtime=runtime, strict=False, **arguments)
        assert_same(ours, theirs, name)
        for layer in range(4 if theirs.gdn_metadata else 0):
            if layer == 3:
                continue
            both = []
            for cls, context in ((getattr(reference, name), theirs), (getattr(atom, name), ours)):
                slots = cls.state_indices_for_layer(
                    attn_inputs=inputs.attention_inputs,
                    is_prefill=inputs.attention_inputs.is_prefill,
                    device=torch.device("cpu"),
                    seq_size_per_block=8,
                    layer_num=layer,
                    state_indices_cache=context.state_indices_cache,
                    layer_group_map=context.layer_group_map,
                )
                both.append(slots)
            assert_same(both[1], both[0], f"{name} state of layer {layer}, seed {seed}")
