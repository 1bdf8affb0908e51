"""The module trees `aiter` and `atom`, as far as a bridge from RTP-LLM imports them."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

REFERENCE = "STEPBIND_ATOM_REFERENCE"
"""Environment variable: the path of ATOM's own forward_context.py, to compare with. It is no part of this project."""


@dataclass
class KVCacheTensor:
    layer_num: int
    k_cache: Any
    v_cache: Any
    k_scale: Any
    v_scale: Any


class GatedDeltaNet(nn.Module):
    """By its sizes: the layer's own tensors are what cache layouts come from."""

    def __init__(self, layer_num: int, value_heads: int = 4, key_heads: int = 2, dim: int = 8, width: int = 4) -> None:
        super().__init__()
        self.layer_num, self.head_k_dim, self.head_v_dim = layer_num, dim, dim
        channels = 2 * key_heads * dim + value_heads * dim
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.zeros(channels, 1, width))
        self.dt_bias = nn.Parameter(torch.zeros(value_heads))


class PagedAttentionImpl(nn.Module):
    def __init__(self, layer_num: int) -> None:
        super().__init__()
        self.layer_num = layer_num


class PagedAttention(nn.Module):
    """Its number may be its own, or its `impl`'s."""

    def __init__(self, layer_num: int | None = None, impl_layer_num: int | None = None) -> None:
        super().__init__()
        self.layer_num = layer_num
        if impl_layer_num is not None:
            self.impl = SimpleNamespace(layer_num=impl_layer_num)


class AttentionForRTPLLM(nn.Module):
    def __init__(self, layer_num: int) -> None:
        super().__init__()
        self.layer_num = layer_num


class RTPMLAAttention(nn.Module):
    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.kv_cache: Any = "before"


class Indexer(nn.Module):
    def __init__(self, head_dim: int = 128) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.k_cache = SimpleNamespace(kv_cache=["before"])


class SparseMLA(nn.Module):
    """The outer module of a sparse MLA layer: it has an indexer and an inner attention."""

    def __init__(self, layer_num: int) -> None:
        super().__init__()
        self.layer_num = layer_num
        self.mla_attn = RTPMLAAttention(layer_num)
        self.indexer = Indexer()


@dataclass
class GDNAttentionMetadata:
    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    num_actual_tokens: int
    has_initial_state: Any = None
    spec_query_start_loc: Any = None
    non_spec_query_start_loc: Any = None
    spec_state_indices_tensor: Any = None
    non_spec_state_indices_tensor: Any = None
    non_spec_state_indices_in_tensor: Any = None
    spec_sequence_masks: Any = None
    spec_token_indx: Any = None
    non_spec_token_indx: Any = None
    num_accepted_tokens: Any = None
    nums_dict: Any = None
    batch_ptr: Any = None
    token_chunk_offset_ptr: Any = None


def compute_causal_conv1d_metadata(query_start: torch.Tensor) -> tuple[dict[int, Any], torch.Tensor, torch.Tensor]:
    """Which row and which chunk of 8 tokens each convolution program has; -1 behind the last one."""
    counts = -(-query_start.diff().cpu() // 8)
    rows = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    chunks: list[int] = []
    for count in counts:
        chunks.extend(range(count))
    total = len(rows)
    listed = torch.tensor(chunks, dtype=torch.int32)
    size = {"size": (2 * max(1024, total),), "device": query_start.device}
    row_ptr, chunk_ptr = (torch.full(fill_value=-1, dtype=torch.int32, **size) for _ in range(2))
    row_ptr[:total].copy_(rows)
    chunk_ptr[:total].copy_(listed)
    values = {
        "nums": counts,
        "tot": counts.sum().item(),
        "mlist": rows,
        "mlist_len": total,
        "offsetlist": listed,
        "batch_ptr": row_ptr,
        "token_chunk_offset_ptr": chunk_ptr,
    }
    return {8: values}, row_ptr, chunk_ptr


@dataclass
class AttentionMetaData:
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    min_seqlen_q: int = 0
    slot_mapping: Any = None
    context_lens: Any = None
    block_tables: Any = None
    cu_seqlen_ks: Any = None
    cu_seqlen_ke: Any = None
    has_cached: bool = False
    total_kv: int | None = None


@dataclass
class Context:
    positions: torch.Tensor
    is_prefill: bool = False
    batch_size: int = 0
    graph_bs: int = 0


@dataclass
class ForwardContext:
    attn_metadata: Any = None
    kv_cache_data: Any = None
    context: Any = None
    num_tokens: int | None = None
    atom_config: Any = None


@dataclass
class Ambient:
    """ATOM's ambient state: the forward context, one for each thread that set it so, and the cache map beside it."""

    forward: ForwardContext = field(default_factory=ForwardContext)
    caches: ForwardContext = field(default_factory=ForwardContext)
    local: threading.local = field(default_factory=threading.local)
    config: Any = field(default_factory=lambda: SimpleNamespace(kv_cache_block_size=0))

    def get_forward_context(self) -> ForwardContext:
        own: ForwardContext | None = getattr(self.local, "ctx", None)
        return self.forward if own is None else own

    def set_forward_context(self, attn_metadata: Any, atom_config: Any, context: Any, num_tokens: int) -> None:
        self.forward = ForwardContext(attn_metadata, self.caches.kv_cache_data, context, num_tokens, atom_config)

    def reset_forward_context(self) -> None:
        self.forward = ForwardContext()

    def set_kv_cache_data(self, data: Any) -> None:
        self.caches.kv_cache_data = data


def _modules(ambient: Ambient) -> dict[str, dict[str, Any]]:
    return {
        "aiter": {"dtypes": SimpleNamespace(fp8=torch.float8_e4m3fn)},
        "atom": {},
        "atom.config": {"KVCacheTensor": KVCacheTensor, "get_current_atom_config": lambda: ambient.config},
        "atom.model_ops": {},
        "atom.model_ops.attention_gdn": {"GatedDeltaNet": GatedDeltaNet},
        "atom.model_ops.attention_mha": {"PagedAttentionImpl": PagedAttentionImpl},
        "atom.model_ops.paged_attention": {"PagedAttention": PagedAttention, "Attention": PagedAttention},
        "atom.model_ops.attentions": {},
        "atom.model_ops.attentions.gdn_attn": {
            "GDNAttentionMetadata": GDNAttentionMetadata,
            "compute_causal_conv1d_metadata": compute_causal_conv1d_metadata,
        },
        "atom.plugin": {},
        "atom.plugin.rtpllm": {},
        "atom.plugin.rtpllm.attention_backend": {"AttentionForRTPLLM": AttentionForRTPLLM},
        "atom.plugin.rtpllm.attention_backend.rtp_mla_attention": {"RTPMLAAttention": RTPMLAAttention},
        "atom.plugin.rtpllm.utils": {},
        "atom.utils": {},
        "atom.utils.forward_context": {
            "AttentionMetaData": AttentionMetaData,
            "Context": Context,
            "_forward_kv_cache_context": ambient.caches,
            "_forward_context_local": ambient.local,
            "get_forward_context": ambient.get_forward_context,
            "reset_forward_context": ambient.reset_forward_context,
            "set_forward_context": ambient.set_forward_context,
            "set_kv_cache_data": ambient.set_kv_cache_data,
        },
    }


@contextmanager
def atom_installed() -> Iterator[Ambient]:
    """`atom` and `aiter` importable inside the block; yields the ambient state."""
    ambient = Ambient()
    names = _modules(ambient)
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    try:
        yield ambient
    finally:
        for name in [*names, *(name for name in sys.modules if name.startswith("atom."))]:
            sys.modules.pop(name, None)


def reference_module() -> ModuleType | None:
    """ATOM's own bridge, where the environment says where it lies; `atom` must be installed."""
    path = os.environ.get(REFERENCE)
    if not path or not Path(path).is_file():
        return None
    source = Path(path).read_text()
    before, start, rest = source.partition("from __future__")
    source = "\n" * before.count("\n") + start + rest  # its lines keep their numbers, by which triton finds kernels
    name = "atom.plugin.rtpllm.utils.forward_context"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = path  # where triton.jit looks for its functions' sources
    sys.modules[name] = module
    exec(compile(source, path, "exec"), vars(module))
    return module
