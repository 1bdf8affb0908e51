"""ATOM's own classes and ambient state, imported from ATOM, and whether the current stream is being captured."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class AtomApi:
    """What the bridge uses of ATOM. `local` is its per-thread forward context, where it has one."""

    kv_cache_tensor: Any
    current_config: Any
    gated_delta_net: type
    paged_attention: tuple[type, ...]
    mla_attention: tuple[type, ...]
    gdn_metadata: Any
    attention_metadata: Any
    context: Any
    cache_context: Any
    reset_forward_context: Any
    set_forward_context: Any
    get_forward_context: Any
    set_kv_cache_data: Any
    local: Any
    fp8: torch.dtype


_AMBIENT = "atom.utils.forward_context"


def atom_api() -> AtomApi:
    """ATOM as it is imported now. Raises `ImportError` that says what is missing."""
    return _api_of(sys.modules.get(_AMBIENT) or _import(_AMBIENT))


@lru_cache(maxsize=4)
def _api_of(ambient: Any) -> AtomApi:
    config = _import("atom.config")
    metadata = _import("atom.model_ops.attentions.gdn_attn")
    backend = "atom.plugin.rtpllm.attention_backend"
    return AtomApi(
        kv_cache_tensor=config.KVCacheTensor,
        current_config=config.get_current_atom_config,
        gated_delta_net=_import("atom.model_ops.attention_gdn").GatedDeltaNet,
        paged_attention=_classes(
            ("atom.model_ops.attention_mha", "PagedAttentionImpl"),
            ("atom.model_ops.paged_attention", "Attention"),
            ("atom.model_ops.paged_attention", "PagedAttention"),
            (backend, "AttentionForRTPLLM"),
        ),
        mla_attention=_classes((f"{backend}.rtp_mla_attention", "RTPMLAAttention")),
        gdn_metadata=metadata.GDNAttentionMetadata,
        attention_metadata=ambient.AttentionMetaData,
        context=ambient.Context,
        cache_context=ambient._forward_kv_cache_context,
        reset_forward_context=ambient.reset_forward_context,
        set_forward_context=ambient.set_forward_context,
        get_forward_context=ambient.get_forward_context,
        set_kv_cache_data=ambient.set_kv_cache_data,
        local=getattr(ambient, "_forward_context_local", None),
        fp8=_import("aiter").dtypes.fp8,
    )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"stepbind.targets.atom hands passes to ATOM's layers and needs ATOM: {name} cannot be imported ({error})."
        ) from error


def _classes(*places: tuple[str, str]) -> tuple[type, ...]:
    """Those of these classes that this version of ATOM has."""
    found = []
    for module, name in places:
        try:
            found.append(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError):
            continue
    return tuple(dict.fromkeys(found))


def capturing(*, on_gpu: bool = False) -> bool:
    """Whether the current stream is being captured. A CPU build of torch cannot be asked that (seed behaviour 25).
    on_gpu: for callers with tensors there, which spares a question."""
    return (on_gpu or torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()
