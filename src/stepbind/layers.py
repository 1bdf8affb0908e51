"""Finding the layers of a model that read the forward context, with their numbers and kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stepbind.caches import IndexSpec, KVSpec, LatentSpec, LayerSpec, StateSpec
from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind
from stepbind.models.family import Family, family_of

RECURRENT_DTYPE = torch.float32
"""The recurrent state's dtype unless the host's layout says otherwise; transformers keeps float32 too."""


@dataclass(frozen=True, eq=False)
class Layer:
    """One context-reading layer: its number, how it reads its cache, and what its cache holds."""

    index: int
    kind: GroupKind
    name: str  # path of the module within the model
    module: nn.Module
    spec: LayerSpec


def discover_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Every context-reading layer of a transformers model, by number.

    Cache layouts come from the modules' own tensors, so that under tensor parallelism they are the local ones.

    Raises `UnknownModelError` for a model of no known family (it lists the known ones), and `StepError` for a model
    that has no such layer or numbers one twice.
    """
    family = family_of(model)
    found: dict[int, Layer] = {}
    for name, module in model.named_modules():
        layer = _as_layer(family, name, module)
        if layer is None:
            continue
        if layer.index in found:
            raise StepError(
                f"layer {layer.index}",
                f"both {found[layer.index].name} and {name}",
                "one module for each layer number",
            )
        found[layer.index] = layer
    if not found:
        expected = " or ".join(family.module_classes)
        raise StepError("model", f"{type(model).__name__} without context-reading layers", f"modules {expected}")
    return tuple(found[index] for index in sorted(found))


def _as_layer(family: Family, name: str, module: nn.Module) -> Layer | None:
    class_name = type(module).__name__
    if class_name == family.attention_class:
        return Layer(module.layer_idx, GroupKind.ATTENTION, name, module, _kv_spec(module))  # type: ignore[arg-type]
    if family.delta is not None and class_name == family.delta.module_class:
        return Layer(module.layer_idx, GroupKind.STATE, name, module, _state_spec(module))  # type: ignore[arg-type]
    if family.latent is not None and class_name == family.latent.module_class:
        return Layer(module.layer_idx, GroupKind.LATENT, name, module, _latent_spec(module))  # type: ignore[arg-type]
    return None


def _kv_spec(module: nn.Module) -> KVSpec:
    weight = _local(module.get_parameter("k_proj.weight"))
    head_dim: int = module.head_dim  # type: ignore[assignment]
    if weight.shape[0] % head_dim:
        raise StepError("k_proj.weight", f"{weight.shape[0]} rows on this rank", f"whole heads of {head_dim}")
    return KVSpec(num_kv_heads=weight.shape[0] // head_dim, head_dim=head_dim, dtype=weight.dtype)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter: transformers' tensor parallelism keeps the whole one's shape in front of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _state_spec(module: nn.Module) -> StateSpec:
    conv = _local(module.get_parameter("conv1d.weight"))  # [channels, 1, width]
    return StateSpec(
        value_heads=_local(module.get_parameter("dt_bias")).numel(),
        value_dim=module.head_v_dim,  # type: ignore[arg-type]
        key_dim=module.head_k_dim,  # type: ignore[arg-type]
        conv_width=conv.shape[2],
        conv_channels=conv.shape[0],
        state_dtype=RECURRENT_DTYPE,
        conv_dtype=conv.dtype,
    )


def _latent_spec(module: nn.Module) -> LatentSpec:
    """The attention module owns the layer; its indexer, where it has one, lives inside."""
    weight = module.get_parameter("kv_a_proj_with_mqa.weight")
    index = None
    if isinstance(module._modules.get("indexer"), nn.Module):
        key_weight = module.get_parameter("indexer.wk.weight")
        index = IndexSpec(dim=key_weight.shape[0], dtype=key_weight.dtype)
    return LatentSpec(elements=weight.shape[0], dtype=weight.dtype, index=index)


def group_layers(
    layers: Sequence[Layer],
    *,
    block_size: int,
    kernel_block_size: int,
    num_blocks: dict[GroupKind, int],
) -> tuple[CacheGroup, ...]:
    """One cache group for each kind of layer that occurs, in the order in which the kinds first occur.

    State groups have no kernel blocks of their own: theirs are as large as the physical ones.
    """
    kinds = dict.fromkeys(layer.kind for layer in layers)
    return tuple(
        CacheGroup(
            name=kind.value,
            kind=kind,
            layers=tuple(layer.index for layer in layers if layer.kind is kind),
            block_size=block_size,
            kernel_block_size=block_size if kind is GroupKind.STATE else kernel_block_size,
            num_blocks=num_blocks[kind],
        )
        for kind in kinds
    )
