"""What RTP-LLM hands over for a pass, read into plain data: both generations of its interface, and nothing decided.

This is the only place that knows RTP's names, and the only one that asks whether an attribute is there. No device
tensor's values are read. Sources: the engine contract, "One pass" and "Blocks".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepbind.errors import StepError
from stepbind.step import Phase


@dataclass(frozen=True, eq=False)
class HostLengths:
    """One length a row, [B] int32 tokens, where the host has it; a tensor without elements counts as none."""

    host: torch.Tensor | None
    device: torch.Tensor | None

    @property
    def rows(self) -> int | None:
        either = self.device if self.host is None else self.host
        return None if either is None else either.numel()


@dataclass(frozen=True, eq=False)
class HostTable:
    """The block table of one of the host's cache groups.

    blocks: [B, C] int32 on the device, the table that RTP calls the kernel one. store_columns: columns of the physical
    table beside it, which is the cache store's (its values are not read: replay does not refresh them).
    """

    tag: str
    blocks: torch.Tensor
    store_columns: int | None


@dataclass(frozen=True, eq=False)
class HostPass:
    """One pass. B rows, T tokens.

    input_len: new tokens of each row in prefill and verify; in decode its size alone means something. prefix_len:
    tokens in the cache before the pass, in prefill and verify. sequence_len: the same in decode, on the host.
    context_len: [B] on the device, in decode sequence_len + 1. layer_to_group: group number of each layer, where the
    host says it. position: [T] rotary positions, where the model asked for them.
    """

    phase: Phase
    is_graph: bool
    num_rows: int
    num_tokens: int
    input_len: HostLengths
    prefix_len: HostLengths
    sequence_len: torch.Tensor | None
    context_len: torch.Tensor | None
    tables: tuple[HostTable, ...]
    layer_to_group: torch.Tensor | None
    position: torch.Tensor | None


@dataclass(frozen=True)
class HostSizes:
    """Tokens in a physical block and in a kernel block."""

    block_size: int
    kernel_block_size: int


@dataclass(frozen=True, eq=False)
class HostMemory:
    """The host's cache: a raw buffer for each layer, and the sizes of its blocks.

    tag_of_layer and sizes by tag: the newer interface. In the older one both are None, and `default_sizes` are those of
    all groups.
    """

    buffers: dict[int, torch.Tensor]
    tag_of_layer: dict[int, str] | None
    sizes: dict[str, HostSizes] | None
    default_sizes: HostSizes | None


def read_pass(inputs: Any, *, is_graph: bool = False, num_tokens: int | None = None) -> HostPass:
    """The pass of RTP's `PyModelInputs`. `is_graph`: known to be captured, whatever the inputs say. `num_tokens`:
    known otherwise than from the input ids.

    Raises `StepError` naming field, got and expected for inputs without attention inputs, lengths or tables, and for
    batch sizes that disagree.
    """
    by_tag = _attention_inputs(inputs)
    first = next(iter(by_tag.values()))
    phase = Phase.DECODE
    if getattr(first, "is_target_verify", False):
        phase = Phase.VERIFY
    elif getattr(first, "is_prefill", False):
        phase = Phase.PREFILL
    input_len = _lengths(first, "input_lengths")
    if input_len.rows is None:
        raise StepError("attention_inputs.input_lengths", "none", "one length for each row")
    num_rows = input_len.rows
    tables = _tables(by_tag, num_rows)
    num_tokens = _num_tokens(inputs, num_rows) if num_tokens is None else num_tokens
    result = HostPass(
        phase=phase,
        is_graph=is_graph or bool(getattr(first, "is_cuda_graph", False)),
        num_rows=num_rows,
        num_tokens=num_tokens,
        input_len=input_len,
        prefix_len=_lengths(first, "prefix_lengths"),
        sequence_len=_tensor(first, "sequence_lengths"),
        context_len=_tensor(first, "sequence_lengths_plus_1_device"),
        tables=tables,
        layer_to_group=_tensor(first, "kv_cache_layer_to_group"),
        position=_position(inputs, first, num_tokens),
    )
    _check_rows(result)
    return result


def longest_context(attention_inputs: Any) -> int | None:
    """Tokens of the longest row, new ones included, by the host's lengths; None where there are none."""
    if isinstance(attention_inputs, Mapping):
        attention_inputs = next(iter(attention_inputs.values()))
    sequence = _tensor(attention_inputs, "sequence_lengths")
    if sequence is not None:
        return int(sequence.max()) + 1
    prefix, new = _tensor(attention_inputs, "prefix_lengths"), _tensor(attention_inputs, "input_lengths")
    return None if prefix is None or new is None else int((prefix + new).max())


def read_memory(kv_cache: Any, layers: Sequence[int]) -> HostMemory:
    """RTP's `kv_cache` for these layer numbers.

    Raises `StepError` for no cache, a layer whose buffer is missing or 0-dimensional, one that is in several groups,
    and block sizes that are none.
    """
    if kv_cache is None:
        raise StepError("kv_cache", "none", "an initialized cache")
    tags: list[str] = list(getattr(kv_cache, "group_tags", None) or ())
    buffers, tag_of_layer = {}, {}
    for layer in layers:
        cache = _layer_cache(kv_cache, layer)
        buffers[layer] = _buffer(cache, layer)
        tag = getattr(cache, "tag", None)
        if tag is not None:
            tag_of_layer[layer] = str(tag)
    if not tags:
        sizes = _sizes(
            int(getattr(kv_cache, "seq_size_per_block", 0)), int(getattr(kv_cache, "kernel_seq_size_per_block", 0)), ""
        )
        return HostMemory(buffers, None, None, sizes)
    by_tag = {
        tag: _sizes(kv_cache.get_seq_size_per_block(tag), kv_cache.get_kernel_seq_size_per_block(tag), f" of {tag!r}")
        for tag in tags
    }
    for layer in layers:
        if tag_of_layer.get(layer) not in by_tag:
            raise StepError(f"layer {layer} cache group", repr(tag_of_layer.get(layer)), f"one of {tags}")
    return HostMemory(buffers, tag_of_layer, by_tag, None)


def _sizes(block_size: int, kernel_block_size: int, whose: str) -> HostSizes:
    if block_size <= 0:
        raise StepError(f"kv_cache.seq_size_per_block{whose}", block_size, "at least 1 token")
    if kernel_block_size < 0 or block_size % (kernel_block_size or block_size):
        raise StepError(
            f"kv_cache.kernel_seq_size_per_block{whose}", kernel_block_size, f"a divisor of the block size {block_size}"
        )
    return HostSizes(block_size, kernel_block_size or block_size)


def _layer_cache(kv_cache: Any, layer: int) -> Any:
    list_groups = getattr(kv_cache, "get_layer_cache_groups", None)
    if list_groups is None:
        return kv_cache.get_layer_cache(layer)
    groups = list(list_groups(layer))
    if len(groups) != 1:
        raise StepError(f"layer {layer} cache groups", [str(group.tag) for group in groups], "one group")
    return groups[0]


def _buffer(cache: Any, layer: int) -> torch.Tensor:
    base = getattr(cache, "kv_cache_base", None)
    if base is None:
        raise StepError(f"layer {layer} kv_cache_base", "none", "the layer's cache buffer")
    if base.dim() == 0:
        raise StepError(f"layer {layer} kv_cache_base", "a tensor of no dimensions", "[blocks, ...]")
    return base  # type: ignore[no-any-return]


def _attention_inputs(inputs: Any) -> Mapping[str, Any]:
    """By tag; one without a tag in the older interface."""
    found = getattr(inputs, "attention_inputs", None)
    if found is None or (isinstance(found, Mapping) and not found):
        raise StepError("inputs.attention_inputs", "none", "attention inputs, or one for each cache group's tag")
    return found if isinstance(found, Mapping) else {"": found}


def _tables(by_tag: Mapping[str, Any], num_rows: int) -> tuple[HostTable, ...]:
    if len(by_tag) > 1 or "" not in by_tag:
        return tuple(_table(tag, _kernel_table(inputs), inputs, num_rows) for tag, inputs in by_tag.items())
    inputs = by_tag[""]
    by_group = getattr(inputs, "kv_cache_kernel_block_id_device_by_group", None)
    if by_group is None or not len(by_group):
        return (_table("", _kernel_table(inputs), inputs, num_rows),)
    single = inputs if len(by_group) == 1 else None
    return tuple(_table(f"group{number}", blocks, single, num_rows) for number, blocks in enumerate(by_group))


def _kernel_table(inputs: Any) -> torch.Tensor | None:
    return getattr(inputs, "kv_cache_kernel_block_id_device", None)


def _table(tag: str, blocks: torch.Tensor | None, inputs: Any, num_rows: int) -> HostTable:
    name = "attention_inputs.kv_cache_kernel_block_id_device" + (f" of {tag!r}" if tag else "")
    if blocks is None or blocks.numel() == 0:
        raise StepError(name, "none" if blocks is None else f"shape {tuple(blocks.shape)}", "a block table")
    if blocks.dim() == 1:
        blocks = blocks[None]
    if blocks.dim() != 2 or blocks.shape[0] != num_rows:
        raise StepError(name, f"shape {tuple(blocks.shape)}", f"[{num_rows} rows as in input_lengths, columns]")
    store = _tensor(inputs, "kv_cache_block_id_device")
    return HostTable(tag, blocks, None if store is None else store.shape[-1])


def _lengths(inputs: Any, name: str) -> HostLengths:
    host, device = _tensor(inputs, name), _tensor(inputs, f"{name}_device")
    if host is not None and host.device.type != "cpu":
        device, host = host if device is None else device, None
    return HostLengths(host, device)


def _tensor(inputs: Any, name: str) -> torch.Tensor | None:
    tensor = getattr(inputs, name, None)
    return None if tensor is None or tensor.numel() == 0 else tensor


def _num_tokens(inputs: Any, num_rows: int) -> int:
    ids, hidden = _tensor(inputs, "input_ids"), _tensor(inputs, "input_hiddens")
    if ids is not None:
        return ids.numel()
    if hidden is not None:
        return hidden.shape[0]
    raise StepError("inputs.input_ids", "none", f"the new tokens of {num_rows} rows (or input_hiddens)")


def _position(inputs: Any, first: Any, num_tokens: int) -> torch.Tensor | None:
    position = _tensor(first, "combo_position_ids")
    if position is None:
        position = _tensor(getattr(inputs, "bert_embedding_inputs", None), "combo_position_ids")
    if position is not None and position.numel() != num_tokens:
        raise StepError("combo_position_ids", f"{position.numel()} positions", f"one for each of {num_tokens} tokens")
    return position


def _check_rows(host: HostPass) -> None:
    context = None if host.context_len is None else host.context_len.numel()
    sequence = None if host.sequence_len is None else host.sequence_len.numel()
    decode = host.phase is Phase.DECODE
    for name, rows in (
        ("prefix_lengths", None if decode else host.prefix_len.rows),
        ("sequence_lengths", sequence if decode else None),
        ("sequence_lengths_plus_1_device", context if decode else None),
    ):
        if rows is not None and rows != host.num_rows:
            raise StepError(f"attention_inputs.{name}", f"{rows} rows", f"{host.num_rows} rows as in input_lengths")
    if decode and context is None and sequence is None:
        raise StepError(
            "attention_inputs.sequence_lengths", "none", "one length for each row (or sequence_lengths_plus_1_device)"
        )
    if not decode and host.prefix_len.rows is None:
        raise StepError("attention_inputs.prefix_lengths", "none", "one length for each row")
