"""Inputs of a usual pass on the CPU, as arrays over the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
_TABLE = "kv_cache_kernel_block_id_device"
_COMMON = (_TABLE, f"{_TABLE}_by_group", "kv_cache_block_id_device", "kv_cache_layer_to_group")
_of_decode = attrgetter("sequence_lengths", "sequence_lengths_plus_1_device", "cu_seqlens_device", *_COMMON)
_of_prefill = attrgetter("input_lengths", "prefix_lengths", "prefix_lengths_device", "cu_seqlens_device", *_COMMON)


class UsualInputs(NamedTuple):
    """What an eager pass is read from: tensors that are all on the host, and arrays over the same memory. Not looked at
    yet: neither shapes nor dtypes nor values.

    attn_inputs: of the first group. tensors, values: in decode the tokens in the cache, context lengths, offsets; in
    prefill the new tokens, those in the cache (twice: the host's and the device's), offsets. tables, table_arrays: of
    each group, or of the store for the first one, where it has one and `physical`; is_store_alike: whether that has the
    shape of the group's own.
    """

    attn_inputs: Any
    is_prefill: bool
    tensors: list[torch.Tensor]
    values: list[Array]
    position: Array
    layer_to_group: Array | None
    tags: tuple[str, ...]
    tables: list[torch.Tensor]
    table_arrays: list[Array]
    is_store_alike: bool


def usual_inputs(inputs: Any, positions: torch.Tensor, *, physical: bool) -> UsualInputs | None:
    """None for a pass in a graph, one that is not all on the host, and one whose inputs lack a field. All arrays are
    made at once: the first one of several costs as much as the others together. physical: by `Profile`."""
    try:
        first, tags, is_store_alike = inputs.attention_inputs, (), True
        others: list[Any] = []
        if isinstance(first, Mapping):
            tags = tuple(first)
            first, *others = first.values()
        if first.is_cuda_graph:
            return None
        is_prefill = first.is_prefill
        *values, table, tables, store, to_group = (_of_prefill if is_prefill else _of_decode)(first)
        if others or not tables:
            tables = [table, *[each.kv_cache_kernel_block_id_device for each in others]]
        if physical and store is not None and store.numel():
            is_store_alike = store.shape == tables[0].shape
            tables = [store, *tables[1:]]
        given = [*values, positions, *tables] if to_group is None else [*values, positions, *tables, to_group]
        arrays = list(map(torch.Tensor.numpy, given))
    except (AttributeError, ValueError, TypeError):  # the last one for what is None, or on a GPU
        return None
    count = len(values)
    end = count + 1 + len(tables)
    own, to_group = arrays[count + 1 : end], arrays[end] if end < len(arrays) else None
    return UsualInputs(
        first, is_prefill, values, arrays[:count], arrays[count], to_group, tags, tables, own, is_store_alike
    )
