"""Making a transformers model's layers read the bound context, for as long as somebody needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import AttentionInterface

from stepbind.groups import GroupKind
from stepbind.layers import Layer, discover_layers
from stepbind.models.attention import NAME, attention_forward
from stepbind.models.family import Family, family_of
from stepbind.models.gated_delta import gated_delta_forward
from stepbind.models.latent import latent_forward

AttentionInterface.register(NAME, attention_forward)


@dataclass(eq=False)
class Adaptation:
    """What was done to a model, by how many scopes it is wanted, and what stood there before."""

    layers: tuple[Layer, ...]
    attention: str
    users: int = 0
    bound_groups: dict[int, int] | None = None  # the last plan's layer -> group that all layers were found in
    own_forward: dict[str, Any] = field(default_factory=dict)  # module name -> an instance's own forward


_adaptations: WeakKeyDictionary[nn.Module, Adaptation] = WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def adapted(model: Any) -> Iterator[tuple[Layer, ...]]:
    """The model's layers, reading the bound context inside the block: attention through transformers' attention
    interface, Gated DeltaNet and latent attention through forwards of ours.

    Scopes nest and may overlap across threads; the last one to leave puts back what the first one replaced, in
    reverse order. Inside, a forward without `bind` raises `NotBoundError`, in whichever thread it runs.

    Raises `UnknownModelError` and `StepError` as `discover_layers`.
    """
    adaptation = enter(model)
    try:
        yield adaptation.layers
    finally:
        leave(model, adaptation)


def enter(model: Any) -> Adaptation:
    """Begin a scope of `adapted`; `leave` ends it."""
    with _lock:
        adaptation = _adaptations.get(model)
        if adaptation is None:
            adaptation = _adapt(model)
            _adaptations[model] = adaptation
        adaptation.users += 1
        return adaptation


def leave(model: Any, adaptation: Adaptation) -> None:
    with _lock:
        adaptation.users -= 1
        if adaptation.users == 0:
            _adaptations.pop(model, None)  # gone already where the scope outlived its model
            _restore(model, adaptation)


def _adapt(model: Any) -> Adaptation:
    family = family_of(model)
    adaptation = Adaptation(discover_layers(model), model.config._attn_implementation)
    model.set_attn_implementation(NAME)
    for layer in adaptation.layers:
        forward = _forward_of(family, layer)
        if forward is None:
            continue
        attributes = vars(layer.module)
        if "forward" in attributes:
            adaptation.own_forward[layer.name] = attributes["forward"]
        layer.module.forward = forward
    return adaptation


def _forward_of(family: Family, layer: Layer) -> Callable[..., Any] | None:
    """The forward that takes the place of a layer's own; None where transformers' attention interface is enough."""
    if layer.kind is GroupKind.STATE and family.delta is not None:
        return partial(gated_delta_forward, layer.module, family.delta)
    if layer.kind is GroupKind.LATENT and family.latent is not None:
        return partial(latent_forward, layer.module, family.latent)
    return None


def _restore(model: Any, adaptation: Adaptation) -> None:
    for layer in reversed(adaptation.layers):
        if layer.kind is not GroupKind.ATTENTION:
            if layer.name in adaptation.own_forward:
                layer.module.forward = adaptation.own_forward[layer.name]
            else:
                del layer.module.forward
    model.set_attn_implementation(adaptation.attention)
