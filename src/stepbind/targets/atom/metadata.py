"""What ATOM's attention layers read in plugin mode: the fields of ATOM's own bridge, by their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class AiterFlashAttentionPhaseMetadata:
    """Of the prefill or decode part of a pass. query_start_loc: [B+1] int32; lengths in tokens."""

    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor


@dataclass
class AiterFlashAttentionMetadataForPluginMode:
    """Of a pass of B rows and T tokens. query_start_loc: [B+1] int32; seq_lens: [B] int32 context lengths, new tokens
    included; slot_mapping: [T] int64, of the first group; block_table: [B, C] int32, of the first group."""

    num_actual_tokens: int
    num_actual_kv_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    num_extends: int
    num_extend_tokens: int
    decode_metadata: AiterFlashAttentionPhaseMetadata | None = None
    prefill_metadata: AiterFlashAttentionPhaseMetadata | None = None
    extend_metadata: Any = None
    use_cascade: bool = False
    common_prefix_len: int = 0
    total_tokens: int = 0
    context: Any = None


@dataclass(frozen=True)
class Profile:
    """In what the three kinds of models differ. One declaration each; the rules are written once.

    prefill_context_is_plus_one: in prefill the plus-one field comes first for context lengths (chunked prefill keeps it
        cumulative), else prefix + input. graph_context_is_sum: in a graph, a decode's context is length + input, else
        the plus-one field (seed behaviour 3). physical_table: tables are in physical blocks, the store's or recovered
        from the kernel one, else the first group's kernel table as it is (4, 6). expand_table: the indexer gets a
        kernel table (5). sparse_fields: request ids, spans and offsets stand in the metadata (11). latent_layers: MLA
        layers get their caches attached (20).
    """

    prefill_context_is_plus_one: bool
    graph_context_is_sum: bool
    physical_table: bool
    expand_table: bool
    sparse_fields: bool
    latent_layers: bool


PLAIN = Profile(True, False, True, False, True, False)
SPARSE_MLA = Profile(True, False, True, True, True, True)
HYBRID = Profile(False, True, False, False, False, False)
