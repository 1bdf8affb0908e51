"""Model families: which transformers architectures stepbind can feed, and what it needs to know of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stepbind.errors import UnknownModelError


@dataclass(frozen=True, eq=False)
class DeltaInputs:
    """What a Gated DeltaNet layer projects from its hidden states. T tokens; all may be strided views."""

    query: torch.Tensor  # [T, key heads, key dim], this and the next two before the convolution
    key: torch.Tensor  # [T, key heads, key dim]
    value: torch.Tensor  # [T, value heads, value dim]
    gate: torch.Tensor  # [T, value heads, value dim], for the gated norm of the output
    b: torch.Tensor  # [T, value heads], the learning rate is beta_scale * sigmoid(b)
    a: torch.Tensor  # [T, value heads], the decay before softplus
    beta_scale: float = 1.0
    joined: torch.Tensor | None = None  # query, key and value side by side, where one projection gives them so

    def mixed(self) -> torch.Tensor:
        """[T, conv channels]: queries, keys and values side by side."""
        if self.joined is not None:
            return self.joined
        return torch.cat([part.flatten(1) for part in (self.query, self.key, self.value)], dim=-1)

    def beta(self) -> torch.Tensor:
        """[T, value heads]: the learning rate."""
        beta = self.b.sigmoid()
        return beta if self.beta_scale == 1 else beta * self.beta_scale


@dataclass(frozen=True, eq=False)
class DeltaLayout:
    """How one architecture's Gated DeltaNet module names and arranges its projections."""

    module_class: str
    project: Callable[[Any, torch.Tensor], DeltaInputs]  # (module, hidden [T, hidden size])
    norm: str  # name of the gated norm submodule
    norm_class: str  # its class, if all is as known: root mean square, weight, silu of the gate
    out: str  # name of the output projection


Rotary = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A rotary embedding of transformers: (query [T, heads, D], key [T, 1, D], cos [T, D], sin [T, D]) -> both, rotated.
Either each half of D is one part of the pairs (half-split), or neighbours are pairs (interleaved)."""


@dataclass(frozen=True, eq=False)
class LatentLayout:
    """How one architecture's latent attention (MLA) module rotates its keys and chooses tokens. The projections are
    named alike in all of them."""

    module_class: str
    rotary: Callable[[Any], Rotary]  # by config
    index_rotary: Rotary | None = None  # of the indexer; None: no indexer, attention to the whole context
    passes_choice: bool = False  # whether a layer hands its choice of tokens on to the next one


@dataclass(frozen=True, eq=False)
class Family:
    """One transformers architecture. Class names are the modeling file's.

    What kind of model it is follows from the layouts declared: `attention_class` alone is a plain model, with `delta`
    a hybrid one, `latent` a latent-attention (MLA) one, sparse where that has an `index_rotary`. Nothing else differs
    between them: layer kinds, cache specs, groups and plans all come from here.
    """

    name: str
    model_types: tuple[str, ...]  # `config.model_type` of the causal language model
    layers: str  # for people: which layer kinds it mixes
    attention_class: str | None = None
    delta: DeltaLayout | None = None
    latent: LatentLayout | None = None
    unsupported: Callable[[Any], str | None] = lambda config: None  # what in a config we cannot serve

    @property
    def module_classes(self) -> tuple[str, ...]:
        """Class names of its context-reading modules."""
        layouts = [layout.module_class for layout in (self.delta, self.latent) if layout is not None]
        return (*([self.attention_class] if self.attention_class else []), *layouts)


def families() -> tuple[Family, ...]:
    """All known families."""
    from stepbind.models import deepseek, dense, glm_moe_dsa, olmo_hybrid, qwen3_5, qwen3_next

    hybrid = (*qwen3_next.FAMILIES, *qwen3_5.FAMILIES, *olmo_hybrid.FAMILIES)
    return (*hybrid, *deepseek.FAMILIES, *glm_moe_dsa.FAMILIES, *dense.FAMILIES)


def family_of(model: nn.Module) -> Family:
    """The family of a transformers model.

    Raises `UnknownModelError`, listing what is known, for any other model and for variants that are not served.
    """
    config = vars(model).get("config")
    model_type = config.model_type if config is not None else type(model).__name__
    for family in families():
        if model_type in family.model_types:
            reason = family.unsupported(config)
            if reason is not None:
                raise UnknownModelError(f"{family.name} model", reason, "full attention on every attention layer")
            return family
    known = ", ".join(f"{family.name} ({', '.join(family.model_types)})" for family in families())
    raise UnknownModelError("model type", repr(model_type), f"one of {known}")
