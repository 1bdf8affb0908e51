"""csrc. Passes that are not usual, tensors that are not as said here among them, give None; nothing is raised."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

def places(buffers: list[torch.Tensor], /) -> bytes | None:
    """Address, device, dtype, shape and strides of each, for `are_at`. None for what DLPack cannot say."""

def are_at(get_layer_cache: Callable[[int], Any], layers: list[int], own: list[torch.Tensor], places: bytes, /) -> bool:
    """Whether the layers' `kv_cache_base`, and behind them the `kv_scale_base` that there are, are the tensors `own`,
    in their `places`."""

def is_content(tensor: torch.Tensor, content: bytes, /) -> bool:
    """Whether a tensor [n] int32 on the host holds these bytes."""

Tensors = tuple[torch.Tensor | None, ...]
"""One for each table; None for those that have none of the kind."""

def decode(
    prior: torch.Tensor,  # [B] int32, tokens in the cache: at least 1
    context: torch.Tensor,  # [B], prior + 1
    start: torch.Tensor,  # offsets of rows: the placeholder, whose last one is 0
    position: torch.Tensor,  # [B], as prior
    tables: list[torch.Tensor],  # [B, C] int32
    sizes: tuple[int, ...],  # tokens an entry, of each table
    limits: tuple[int, int],  # a good entry is from the first one on, below the second
    paged: tuple[int, ...],  # numbers of the tables whose groups have slots
    has_states: bool,
    /,
) -> tuple[int, int, Tensors, Tensors, Tensors] | None:
    """The longest context and the sum of contexts, in tokens; slots [B] int64; with `has_states` of all tables those
    that states are read from and written to, [B] int32."""

def prefill(
    new: torch.Tensor,  # [B] int32
    prior: torch.Tensor,  # [B] int32
    prior_device: torch.Tensor,  # [B], as prior
    start: torch.Tensor,  # [B+1] int32, offsets of rows of at least one token
    position: torch.Tensor,  # [T], prior and on, row by row
    tables: list[torch.Tensor],
    sizes: tuple[int, ...],
    limits: tuple[int, int],
    paged: tuple[int, ...],
    has_states: bool,
    by_token: bool,
    /,
) -> tuple[int, int, int, bool, Tensors, Tensors, Tensors, tuple[Any, Any, Any, Any, Any]] | None:
    """The longest context, the sum of contexts, most new tokens of a row, whether any has some in the cache; slots [T]
    int64, states as in `decode`; contexts [B] int32, has_prior [B] bool, and with `by_token` row, span_start and
    span_end [T] int32, else None."""

def decode_lengths(
    new: torch.Tensor,  # [B]
    prefix: torch.Tensor,  # empty
    prior: torch.Tensor,  # [B] int32 on the host: at least 1
    context: torch.Tensor,  # [B] int32 where `table` is: prior + 1, which is not looked at
    start: torch.Tensor,  # int32 on the host: the placeholder, whose last one is 0
    rows: int,
    table: torch.Tensor,
    /,
) -> tuple[int, int, int] | None:
    """The longest context and the sum of contexts, in tokens; the address of `context`."""

def prefill_lengths(
    new: torch.Tensor,  # [B] int32 on the host: at least 1
    new_device: torch.Tensor,  # [B] int32 where `table` is: as `new`, which is not looked at
    prior: torch.Tensor,  # [B] int32 on the host
    prior_device: torch.Tensor,  # [B] int32 where `table` is
    start: torch.Tensor,  # [B+1] int32 on the host, by `new`
    rows: int,
    tokens: int,
    table: torch.Tensor,
    state_sizes: tuple[int, ...],  # block sizes, in tokens
    /,
) -> tuple[int, int, int, bool, int, int, int, int] | None:
    """Most new tokens of a row, the longest context, the sum of contexts; whether a row has tokens in the cache; chunks
    of 8 tokens; most block boundaries inside the rows' new tokens, of any size; the addresses of the device's."""

def conv_programs(
    query_start: npt.NDArray[np.integer], chunk: int, least: int, with_lists: bool, /
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, Any, Any]:
    """Chunks of `chunk` tokens: of all rows, of each row (of the offsets' dtype), the row of each int64 and its number
    in there int32; `with_lists` both again as int32 of twice as many as there are (or `least`), -1 behind the last.
    Raises ValueError for offsets that fall."""
