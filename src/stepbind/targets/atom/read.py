"""A pass of RTP-LLM's, read for ATOM. The only place here that asks whether an attribute is there.

On the CPU, device copies are as readable as host ones, and the order of fields is the reference's own, profile by
profile (seed behaviours 2 and 3). On a GPU values come from the host's mirrors alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stepbind.errors import StepError
from stepbind.step import Lengths
from stepbind.targets.atom.metadata import Profile

Numbers = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int32] | npt.NDArray[np.int64]
"""int32 where the host gave them, int64 where they are sums: the reference's dtypes, which ATOM's readers get."""


class AtomPass(NamedTuple):
    """One pass of B rows, as the host has it. tables: the kernel table of each of its groups; store: the first group's
    physical one. Tensors without elements are None."""

    attn_inputs: Any  # the first group's, in the newer generation
    is_prefill: bool
    graph_flag: bool
    num_rows: int
    input_len: torch.Tensor
    prefix_len: torch.Tensor | None  # on the host where the host has it
    prefix_len_device: torch.Tensor | None
    sequence_len: torch.Tensor | None
    plus_one: torch.Tensor | None
    query_start: torch.Tensor | None
    query_start_device: torch.Tensor | None
    tables: tuple[torch.Tensor, ...]
    tags: tuple[str, ...]
    store: torch.Tensor | None
    layer_to_group: torch.Tensor | None


def read(inputs: Any) -> AtomPass:
    """Raises `StepError` for what is missing or disagrees in its batch size."""
    return read_attention(getattr(inputs, "attention_inputs", None))


def read_attention(found: Any) -> AtomPass:
    """As `read`, from attention inputs, or one for each tag."""
    tags: tuple[str, ...] = ()
    each: tuple[Any, ...] = (found,)
    if isinstance(found, Mapping):
        tags, each = tuple(found), tuple(found.values())
    if found is None or not each:
        raise StepError("inputs.attention_inputs", "none", "attention inputs, or one for each cache group's tag")
    first = each[0]
    tables = getattr(first, "kv_cache_kernel_block_id_device_by_group", None) if len(each) == 1 else None
    if tables is None or not len(tables):
        tables = [getattr(one, "kv_cache_kernel_block_id_device", None) for one in each]
    input_len = _tensor(first, "input_lengths")
    if input_len is None:
        raise StepError("attention_inputs.input_lengths", "none", "one length for each row")
    rows = input_len.numel()
    is_prefill = bool(getattr(first, "is_prefill", False))
    prefix, prefix_device = _tensor(first, "prefix_lengths"), _tensor(first, "prefix_lengths_device")
    sequence, plus_one = _tensor(first, "sequence_lengths"), _tensor(first, "sequence_lengths_plus_1_device")
    if is_prefill:
        _check_rows(rows, ("prefix_lengths", prefix), ("prefix_lengths_device", prefix_device))
    else:
        _check_rows(rows, ("sequence_lengths", sequence), ("sequence_lengths_plus_1_device", plus_one))
    store = _tensor(first, "kv_cache_block_id_device")
    return AtomPass(
        first,
        is_prefill,
        bool(getattr(first, "is_cuda_graph", False)),
        rows,
        input_len,
        prefix,
        prefix_device,
        sequence,
        plus_one,
        _tensor(first, "cu_seqlens"),
        _tensor(first, "cu_seqlens_device"),
        tuple([_table(table, rows, "attention_inputs.kv_cache_kernel_block_id_device") for table in tables]),
        tags,
        None if store is None else _table(store, rows, "attention_inputs.kv_cache_block_id_device"),
        _tensor(first, "kv_cache_layer_to_group"),
    )


def _tensor(inputs: Any, name: str) -> torch.Tensor | None:
    tensor = getattr(inputs, name, None)
    return tensor if tensor is not None and tensor.numel() else None


def _table(table: torch.Tensor | None, rows: int, name: str) -> torch.Tensor:
    """[B, C] int32; one dimension is a single row."""
    if table is None or not table.numel():
        raise StepError(name, "none" if table is None else f"shape {tuple(table.shape)}", "a block table")
    if table.dim() == 1:
        table = table[None]
    if table.dim() != 2 or table.shape[0] != rows:
        raise StepError(name, f"shape {tuple(table.shape)}", f"[{rows} rows as in input_lengths, columns]")
    return table if table.dtype == torch.int32 and table.is_contiguous() else table.to(torch.int32).contiguous()


def _check_rows(rows: int, *given: tuple[str, torch.Tensor | None]) -> None:
    """Raises `StepError` where neither is there, or one is of other rows."""
    is_missing = True
    for name, lengths in given:
        if lengths is not None:
            is_missing = False
            if lengths.numel() != rows:
                raise StepError(
                    f"attention_inputs.{name}", f"{lengths.numel()} rows", f"{rows} rows as in input_lengths"
                )
    if is_missing:
        raise StepError(f"attention_inputs.{given[0][0]}", "none", f"one for each row (or {given[1][0]})")


def numbers(tensor: torch.Tensor | None) -> Numbers | None:
    """Values of a tensor that is on the host; None for others."""
    if tensor is None or not tensor.is_cpu:
        return None
    array: Numbers = tensor.numpy()
    return array if array.dtype == np.int32 else Lengths.of(tensor).host


def prefix_of(host: AtomPass, *, device_first: bool) -> torch.Tensor:
    pair = (host.prefix_len_device, host.prefix_len) if device_first else (host.prefix_len, host.prefix_len_device)
    found = pair[0] if pair[0] is not None else pair[1]
    assert found is not None
    return found


def context_lengths(host: AtomPass, profile: Profile, *, in_graph: bool) -> torch.Tensor:
    """[B] context lengths by the profile's order of fields (seed behaviour 3), wherever those are."""
    if host.is_prefill:
        if profile.prefill_context_is_plus_one and host.plus_one is not None:
            return host.plus_one
        prefix = prefix_of(host, device_first=True)
        return prefix + host.input_len.to(prefix.device, non_blocking=True)
    by_sum = profile.graph_context_is_sum and in_graph and host.sequence_len is not None
    if host.plus_one is not None and not by_sum:
        return host.plus_one
    assert host.sequence_len is not None
    return host.sequence_len + host.input_len.to(host.sequence_len.device)


def query_start_of(host: AtomPass) -> Offsets:
    """[B+1] offsets of the rows' first tokens (seed behaviour 2): the host's own where they are not the placeholder,
    from input lengths in prefill, and one token a row in decode (or plus-one minus length)."""
    rows = host.num_rows
    given = numbers(host.query_start_device)
    if given is None:
        given = numbers(host.query_start)
    if given is not None and given.size > 1 and given[-1] > 0:
        return given[: rows + 1]
    if host.is_prefill:
        lengths = numbers(host.input_len)
        if lengths is None:
            raise StepError("attention_inputs.input_lengths", "a device tensor", "lengths on the host")
        return offsets(lengths)
    plus_one, sequence = numbers(host.plus_one), numbers(host.sequence_len)
    new = None if plus_one is None or sequence is None else plus_one - sequence
    if new is None or new.max() <= 1:
        return one_each(rows)
    return offsets(np.maximum(new, 1))


@lru_cache(maxsize=1024)
def one_each(rows: int) -> npt.NDArray[np.int64]:
    """0 .. rows; nobody writes to it."""
    return np.arange(rows + 1)


def query_start_for(host: AtomPass, num_tokens: int, query_start: Offsets) -> Offsets:
    """The offsets that fit `num_tokens`: those given, else by input lengths, one token a row, or a single row.

    Raises `StepError` where nothing fits.
    """
    rows = host.num_rows
    if query_start.size == rows + 1 and query_start[-1] == num_tokens:
        if num_tokens == rows or rows == 1 or (query_start[1:] > query_start[:-1]).all():
            return query_start
    lengths = numbers(host.input_len)
    if lengths is not None and lengths.min() > 0 and lengths.sum() == num_tokens:
        return offsets(lengths)
    if num_tokens == rows:
        return np.arange(rows + 1, dtype=np.int32)
    if rows == 1:
        return np.array([0, num_tokens], dtype=np.int32)
    raise StepError("positions", f"{num_tokens} tokens", f"as many as the lengths of {rows} rows say")


def offsets(lengths: Numbers) -> Offsets:
    start = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=start[1:])
    return start
