"""ATOM's metadata objects out of a computed pass, with all the fields of ATOM's own bridge and the groups' own beside
them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from stepbind.targets.atom.api import AtomApi
from stepbind.targets.atom.computed import Computed
from stepbind.targets.atom.groups import AtomGroups
from stepbind.targets.atom.metadata import (
    AiterFlashAttentionMetadataForPluginMode,
    AiterFlashAttentionPhaseMetadata,
    Profile,
)
from stepbind.targets.atom.passes import PlanBuffers
from stepbind.targets.atom.read import AtomPass
from stepbind.targets.atom.shared import conv_programs
from stepbind.targets.atom.tables import to_kernel
from stepbind.targets.atom.usual import UsualInputs

Host = AtomPass | UsualInputs
StateCaches = tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]
"""State slots by (group number, is prefill): those to write and those to read."""


class Made(NamedTuple):
    """ATOM's objects of a pass of `num_rows` rows. state_write: the state slots that layers ask for and add to."""

    gdn: Any
    metadata: Any
    state_write: dict[Any, torch.Tensor]
    num_rows: int


def make(
    host: Host,
    computed: Computed,
    groups: AtomGroups,
    profile: Profile,
    api: AtomApi,
    cg_bufs: Any,
    captured: PlanBuffers | None,
    has_gdn: bool,
) -> Made:
    """captured: as in `attention_metadata`."""
    caches = state_caches(host, computed)
    gdn = gdn_metadata(host, computed, groups, api, caches) if has_gdn else None
    metadata = attention_metadata(host, computed, groups, profile, api, cg_bufs, captured)
    metadata.gdn_metadata = gdn
    metadata.rtp_attn_inputs = host.attn_inputs
    metadata.rtp_kernel_seq_size_per_block = groups.kernel_block_size
    metadata.rtp_seq_size_per_block = groups.block_size
    metadata.rtp_layer_group_map = groups.layer_to_group
    return Made(gdn, metadata, caches[0], computed.num_rows)


def gdn_metadata(host: Host, computed: Computed, groups: AtomGroups, api: AtomApi, caches: StateCaches) -> Any:
    """`GDNAttentionMetadata`. `caches`: of `state_caches`."""
    rows, tokens = computed.num_rows, computed.num_tokens
    prefill = host.is_prefill
    programs = batch = offset = None
    start = computed.shared.query_start if computed.own_start is None else computed.own_start
    if prefill:
        programs, batch, offset = conv_programs(computed.query_start_host, computed.shared)
    metadata = api.gdn_metadata(
        num_prefills=rows if prefill else 0,
        num_prefill_tokens=tokens if prefill else 0,
        num_decodes=0 if prefill else rows,
        num_decode_tokens=0 if prefill else tokens,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=tokens,
        has_initial_state=computed.has_prior,
        non_spec_query_start_loc=start,
        non_spec_state_indices_tensor=computed.state_write,
        nums_dict=programs,
        batch_ptr=batch,
        token_chunk_offset_ptr=offset,
    )
    metadata.non_spec_state_indices_in_tensor = computed.state_read
    metadata.rtp_attn_inputs = host.attn_inputs
    metadata.rtp_seq_size_per_block = groups.block_size
    metadata.rtp_state_indices_cache = caches[0]
    metadata.rtp_state_indices_in_cache = caches[1]
    metadata.rtp_layer_group_map = groups.layer_to_group
    return metadata


def state_caches(host: Host, computed: Computed) -> StateCaches:
    """State slots of every group."""
    if computed.states is not None:
        return computed.states.write, computed.states.read
    write: dict[Any, torch.Tensor] = {}
    read: dict[Any, torch.Tensor] = {}
    key = (0, host.is_prefill)
    if computed.state_write is None or computed.state_read is None:
        return write, read
    write[key], read[key] = computed.state_write, computed.state_read
    for group in computed.groups:
        if group.state_write is not None and group.state_read is not None:
            key = (group.number, host.is_prefill)
            write[key], read[key] = group.state_write, group.state_read
    return write, read


def attention_metadata(
    host: Host,
    computed: Computed,
    groups: AtomGroups,
    profile: Profile,
    api: AtomApi,
    cg_bufs: Any,
    captured: PlanBuffers | None,
) -> Any:
    """`AttentionMetaData` with its plugin metadata. `captured`: buffers of a captured pass, None for an eager one."""
    prefill, shared = host.is_prefill, computed.shared
    rows, tokens = computed.num_rows, computed.num_tokens
    start = shared.query_start
    phase = AiterFlashAttentionPhaseMetadata(computed.max_query, computed.max_context, start)
    plugin: Any = AiterFlashAttentionMetadataForPluginMode(
        num_actual_tokens=tokens,
        num_actual_kv_tokens=computed.total_context,
        max_query_len=computed.max_query,
        query_start_loc=start,
        max_seq_len=computed.max_context,
        seq_lens=computed.seq_lens,
        slot_mapping=computed.slot_mapping,
        block_table=computed.block_table,
        num_decodes=0 if prefill else rows,
        num_decode_tokens=0 if prefill else tokens,
        num_prefills=rows if prefill else 0,
        num_prefill_tokens=tokens if prefill else 0,
        num_extends=0,
        num_extend_tokens=0,
        decode_metadata=None if prefill else phase,
        prefill_metadata=phase if prefill else None,
    )
    plugin.rtp_cu_seqlens_q = start
    plugin.is_dummy_warmup = computed.is_dummy
    plugin.rtp_has_prefix = computed.has_prefix
    plugin.rtp_groups = computed.groups
    extra: dict[str, Any] = {}
    block_tables = computed.block_table
    if profile.sparse_fields:
        plugin.req_id_per_token = shared.row_of_token
        plugin.topk_tokens = 0
        plugin.sparse_block_size = groups.block_size
        plugin.cg_bufs = cg_bufs
        extra = {
            "cu_seqlens_q": start,
            "cu_seqlens_k": start,
            "cu_seqlen_ks": shared.span_start,
            "cu_seqlen_ke": shared.span_end,
            "has_cached": False,
            "total_kv": computed.total_context,
        }
        if profile.expand_table:
            block_tables = _indexer_table(computed, groups, captured)
    metadata = api.attention_metadata(
        max_seqlen_q=computed.max_query,
        max_seqlen_k=computed.max_context,
        block_tables=block_tables,
        slot_mapping=computed.slot_mapping,
        context_lens=computed.seq_lens,
        **extra,
    )
    metadata.plugin_metadata = plugin
    metadata.rtp_groups = computed.groups
    return metadata


def _indexer_table(computed: Computed, groups: AtomGroups, captured: PlanBuffers | None) -> torch.Tensor:
    """The table in kernel blocks (seed behaviour 5); in a capture one that is wide enough already is used as it is."""
    table, ratio = computed.block_table, groups.block_size // groups.kernel_block_size
    if captured is None:
        return to_kernel(table, ratio, None)
    if table.shape[1] >= -(-computed.max_context // groups.kernel_block_size):
        return table
    return to_kernel(table, ratio, captured.table("kernel", table.shape[0], table.shape[1] * ratio, table.device))
