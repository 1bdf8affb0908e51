"""A pass through one of the three classes, for tests with numbers computed by hand.

Blocks are of 8 tokens. Three requests stand in most tests: prior 0, 5, 16 tokens; new 3, 4, 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepbind.targets import atom
from stepbind.targets.atom import api
from tests.targets.atom_double.passes import (
    hybrid_model,
    latent_model,
    pass_inputs,
    plain_model,
    positions_of,
    runtime_for,
)

PLAIN, LATENT, HYBRID = atom.RTPForwardContext, atom.RTPForwardMLAContext, atom.RTPForwardQwen35HybridContext
MODELS: dict[Any, Callable[..., Any]] = {PLAIN: plain_model, LATENT: latent_model, HYBRID: hybrid_model}
CLASSES = [pytest.param(cls, id=name) for cls, name in ((PLAIN, "plain"), (LATENT, "mla"), (HYBRID, "hybrid"))]
every_class = pytest.mark.parametrize("cls", CLASSES)

QUERY, PRIOR = [3, 4, 1], [0, 5, 16]
TABLE = [[4, 0, 0], [7, 9, 0], [2, 3, 5]]
DECODE_PRIOR = [7, 8, 16]
DECODE_TABLE = [[4, 0, 0], [7, 9, 0], [2, 3, 5]]


class Case:
    """A pass through one class."""

    def __init__(self, cls: Any, inputs: Any, positions: torch.Tensor, *, ratio: int = 1, blocks: int = 12) -> None:
        self.cls, self.inputs, self.positions = cls, inputs, positions
        self.model = MODELS[cls]()
        self.runtime = runtime_for(self.model, 8, 8 // ratio, blocks)

    @property
    def attention(self) -> Any:
        return self.inputs.attention_inputs

    def arguments(self, **more: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "runtime": self.runtime,
            "inputs": self.inputs,
            "positions": self.positions,
            **more,
        }

    def build(self, **more: Any) -> Any:
        return self.cls.build(**self.arguments(**more))

    def bind(self, **more: Any) -> Any:
        return self.cls.bind(**self.arguments(**more))

    def plugin(self, **more: Any) -> Any:
        return self.build(**more).attn_metadata.plugin_metadata


def prefill(cls: Any, table: Any = TABLE, **more: Any) -> Case:
    sizes = {key: more.pop(key) for key in ("ratio", "blocks") if key in more}
    inputs = pass_inputs(prefill=True, query=QUERY, prior=PRIOR, tables=[table], **more)
    return Case(cls, inputs, positions_of(QUERY, PRIOR), **sizes)


def decode(cls: Any, table: Any = DECODE_TABLE, prior: list[int] = DECODE_PRIOR, **more: Any) -> Case:
    sizes = {key: more.pop(key) for key in ("ratio", "blocks") if key in more}
    inputs = pass_inputs(prefill=False, query=[1] * len(prior), prior=prior, tables=[table], **more)
    return Case(cls, inputs, positions_of([1] * len(prior), prior), **sizes)


def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "capturing", lambda **_: True)
