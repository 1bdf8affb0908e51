"""A pass of RTP-LLM's as a `Step`.

Where the host's lengths are on the host, they give the sizes; device copies beside them spare the fill a copy. In a
graph, and for a decode whose lengths are on the device alone, sizes come from what the tables can hold and values from
the device: from exactly what RTP refreshes before a replay (engine contract, "Graph capture and replay").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stepbind.errors import StepError
from stepbind.groups import GroupKind
from stepbind.hosts.rtp_llm.groups import GroupSource, granularity_of
from stepbind.hosts.rtp_llm.reader import HostPass
from stepbind.step import BlockTable, Granularity, Lengths, Phase, Step


@dataclass(frozen=True, eq=False)
class Scratch:
    """Buffers [max rows] for lengths that are computed on the device, so that a captured pass allocates nothing."""

    ones: torch.Tensor  # int32
    live: torch.Tensor  # bool
    covered: torch.Tensor  # bool
    query: torch.Tensor  # int32
    prior: torch.Tensor  # int32

    @staticmethod
    def of(max_rows: int, device: torch.device) -> Scratch:
        def empty(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_rows, dtype=dtype, device=device)

        ones = torch.ones(max_rows, dtype=torch.int32, device=device)
        return Scratch(ones, empty(torch.bool), empty(torch.bool), empty(torch.int32), empty(torch.int32))


@dataclass(frozen=True)
class StepOptions:
    """How passes are read.

    read_back: for a prefill whose lengths are on the device alone, wait for the GPU and read them once; otherwise such
    a pass is an error. granularity: what the ids of a group's table count, by group name, where that is not to be told
    from its width. padded_chunks: `Step.padded_chunks`.
    """

    read_back: bool = False
    granularity: Mapping[str, Granularity] | None = None
    padded_chunks: int = 0


@dataclass(frozen=True, eq=False)
class _PassLengths:
    query: Lengths
    prior: Lengths
    are_bounds: bool = False
    contexts_on_device: bool = False


def step_of(
    host: HostPass, sources: Sequence[GroupSource], scratch: Scratch, max_context: int, options: StepOptions
) -> Step:
    """The step of a pass. max_context: tokens of the longest row that the arena takes, which bounds lengths that are
    on the device alone.

    Raises `StepError` for a prefill in a graph, lengths that are nowhere or only where they may not be read from,
    tables that are ambiguous (see `granularity_of`), and all that `Step` checks.
    """
    lengths = _host_lengths(host, scratch, options)
    is_dummy = lengths is not None and not lengths.query.host.any()
    longest = None if lengths is None else int((lengths.query.host.astype(np.int64) + lengths.prior.host).max())
    tables = tuple(_block_table(host, source, longest, options) for source in sources)
    if lengths is None:
        lengths = _bounded_lengths(host, tables, scratch, max_context)
    position = host.position
    if host.is_graph or lengths.are_bounds or is_dummy:
        position = None  # replay does not refresh it: positions are counted from the lengths
    elif position is not None:
        position = position.to(tables[0].blocks.device, non_blocking=True)
    step = Step(
        phase=host.phase,
        query_len=lengths.query,
        prior_len=lengths.prior,
        tables=tables,
        position=position,
        padded_tokens=host.num_tokens,
        padded_chunks=options.padded_chunks,
        lengths_are_bounds=lengths.are_bounds,
        contexts_on_device=lengths.contexts_on_device,
    )
    if not step.is_dummy and step.num_tokens != host.num_tokens:
        raise StepError("input_ids", f"{host.num_tokens} tokens", f"the {step.num_tokens} that the lengths say")
    return step


def _block_table(host: HostPass, source: GroupSource, max_context: int | None, options: StepOptions) -> BlockTable:
    table = host.tables[source.table]
    given = (options.granularity or {}).get(source.group.name)
    return BlockTable(source.group, table.blocks, given or granularity_of(source, table, max_context))


def _host_lengths(host: HostPass, scratch: Scratch, options: StepOptions) -> _PassLengths | None:
    """Lengths with host values, None where they are on the device alone."""
    if host.is_graph:
        return None
    if host.phase is Phase.DECODE:
        return _decode_lengths(host, scratch)
    query, prior = host.input_len, host.prefix_len
    if query.host is None or prior.host is None:
        if host.phase is Phase.VERIFY and not options.read_back:
            return None
        if not options.read_back:
            raise StepError(
                "attention_inputs.input_lengths and prefix_lengths",
                "no host values",
                "lengths on the host, or read_back=True to wait for the GPU once a prefill",
            )
    return _PassLengths(
        Lengths(_int32(_on_host(query.host, query.device)), query.device),
        Lengths(_int32(_on_host(prior.host, prior.device)), prior.device),
    )


def _decode_lengths(host: HostPass, scratch: Scratch) -> _PassLengths | None:
    if host.sequence_len is None or host.sequence_len.device.type != "cpu":
        return None
    rows = host.num_rows
    prior = _int32(host.sequence_len)
    if not prior.any():  # the probe for the output dtype and the warm-up before capture
        return _PassLengths(Lengths(np.zeros(rows, np.int32)), Lengths(prior))
    if host.context_len is None:
        return _PassLengths(Lengths(np.ones(rows, np.int32), scratch.ones[:rows]), Lengths(prior))
    ones = Lengths(np.ones(rows, np.int32), scratch.ones[:rows])
    return _PassLengths(ones, Lengths(prior, host.context_len), contexts_on_device=True)


def _bounded_lengths(host: HostPass, tables: Sequence[BlockTable], scratch: Scratch, max_context: int) -> _PassLengths:
    """Bounds from what the tables hold, values from the device. Rows without a context have no length at all; in a
    graph nor do rows whose first block is none, whatever their lengths say: replay leaves those of padding rows."""
    if host.phase is Phase.PREFILL:
        raise StepError("is_cuda_graph", "a prefill pass", "decode or target verify passes in a graph")
    rows, each = host.num_rows, host.num_tokens // host.num_rows
    if each * rows != host.num_tokens or (host.phase is Phase.DECODE and each != 1):
        raise StepError("input_ids", f"{host.num_tokens} tokens", f"as many in each of the {rows} rows (1 in decode)")
    live, query, prior = scratch.live[:rows], scratch.query[:rows], scratch.prior[:rows]
    if host.phase is Phase.DECODE:
        if host.context_len is None:
            raise StepError("attention_inputs.sequence_lengths_plus_1_device", "none", "the context of each row")
        torch.gt(host.context_len, 0, out=live)
        torch.sub(host.context_len, 1, out=prior)
        new = scratch.ones[:rows]
    else:
        if host.input_len.device is None or host.prefix_len.device is None:
            raise StepError("input_lengths_device and prefix_lengths_device", "none", "the lengths of each row")
        torch.gt(host.input_len.device, 0, out=live)
        prior.copy_(host.prefix_len.device)
        new = host.input_len.device
    if host.is_graph:
        first = first_paged(tables)
        torch.ge(first.blocks[:, 0], first.group.first_block, out=scratch.covered[:rows])
        live.logical_and_(scratch.covered[:rows])
    torch.mul(new, live, out=query)
    prior.mul_(live)
    longest = longest_prior(tables, host.phase, each, max_context)
    return _PassLengths(
        Lengths(np.full(rows, each, np.int32), query), Lengths(np.full(rows, longest, np.int32), prior), True
    )


def first_paged(tables: Sequence[BlockTable]) -> BlockTable:
    """The table whose first column tells live rows from padding: a recurrent group's may be -1 in a live row."""
    for table in tables:
        if table.group.kind is not GroupKind.STATE:
            return table
    raise StepError("tables", "recurrent groups alone", "an attention group, whose first block tells a live row")


def longest_prior(tables: Sequence[BlockTable], phase: Phase, query: int, max_context: int) -> int:
    """Most tokens that a row can have in the cache before `query` new ones, by the tables' columns."""
    longest = max_context - query
    for table in tables:
        columns = table.blocks.shape[1]
        if phase is Phase.VERIFY and table.group.kind is GroupKind.STATE:
            blocks = columns * table.tokens_per_entry // table.group.block_size
            longest = min(longest, (blocks - query + 1) * table.group.block_size - 1)
        else:
            longest = min(longest, columns * table.tokens_per_entry - query)
    if longest < 0:
        shapes = [tuple(table.blocks.shape) for table in tables]
        raise StepError("block tables", f"shapes {shapes}", f"columns for {query} new tokens a row")
    return longest


def _on_host(host: torch.Tensor | None, device: torch.Tensor | None) -> torch.Tensor:
    if host is not None:
        return host
    assert device is not None
    return device.cpu()


def _int32(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return Lengths.of(tensor).host
