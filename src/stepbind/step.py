"""What a host says about one forward pass.

A `Step` is checked once, when it is made, and only from host lengths: nothing here reads a device tensor's
values, so making one never waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from operator import add

import numpy as np
import numpy.typing as npt
import torch

from stepbind.errors import StepError
from stepbind.groups import CacheGroup, GroupKind, check_groups

INT32_MAX = 2**31 - 1

FEW_ROWS = 16
"""Rows up to which Python's own integers count lengths faster than numpy, whose every call costs 1 to 2 us."""


class Phase(Enum):
    """The kind of a pass."""

    PREFILL = "prefill"  # any query lengths, prior context allowed (chunks, prefix hits)
    DECODE = "decode"  # one new token a row
    VERIFY = "verify"  # several drafted tokens a row, each of which may be dropped later


class Granularity(Enum):
    """What the ids of a block table count."""

    PHYSICAL = "physical"
    KERNEL = "kernel"


@dataclass(frozen=True, eq=False)
class Lengths:
    """One length a row, in tokens: `host` [B] int32 always, `device` [B] int32 where the host engine has one.

    `host` rules: every scalar of a step comes from it. `device` must hold the same values when the plan is
    filled; it spares the fill a copy.
    """

    host: npt.NDArray[np.int32]
    device: torch.Tensor | None = None

    @staticmethod
    def of(values: Sequence[int] | npt.NDArray[np.integer] | torch.Tensor) -> Lengths:
        """Lengths from a list, an array or a CPU tensor. Raises `StepError` for anything that lives on a GPU."""
        if isinstance(values, torch.Tensor):
            if values.device.type != "cpu":
                raise StepError("lengths", f"a tensor on {values.device}", "host values (a CPU tensor or list)")
            values = values.numpy()
        wide = np.asarray(values, dtype=np.int64)
        if wide.size and (wide.max() > INT32_MAX or wide.min() < -INT32_MAX):
            raise StepError("lengths", int(np.abs(wide).max()), f"at most {INT32_MAX} tokens a row")
        return Lengths(wide.astype(np.int32))


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Block ids of one cache group: `blocks` [B, C] int32, entry (b, c) holds tokens c*size .. (c+1)*size-1 of
    row b, where size is the group's block size (PHYSICAL) or kernel block size (KERNEL), in tokens."""

    group: CacheGroup
    blocks: torch.Tensor
    granularity: Granularity = Granularity.PHYSICAL

    @property
    def tokens_per_entry(self) -> int:
        return self.group.block_size if self.granularity is Granularity.PHYSICAL else self.group.kernel_block_size


class BlockTables(tuple[BlockTable, ...]):
    """The tables of a step, one for each cache group, looked at once: a host whose tables stay where they are keeps
    one of these (for each number of rows) between steps, instead of making it again.

    heights: the numbers of rows that occur. max_context: tokens of a row that every table has columns for, outside of
    verify. pointers: where the tables were when they were looked at. fields: all that a kernel needs to find an entry,
    five numbers a table: address, row stride, column stride (in elements), columns, entries of a physical block.

    Raises `StepError` for groups that `check_groups` refuses and for tables that are not int32, have another number
    of dimensions than 2 or no columns, or are not all on one device.
    """

    groups: tuple[CacheGroup, ...]
    device: torch.device
    heights: tuple[int, ...]
    max_context: int
    pointers: list[int]
    fields: tuple[int, ...]

    def __new__(cls, tables: Iterable[BlockTable]) -> BlockTables:
        self = super().__new__(cls, tables)
        self.groups = check_groups([table.group for table in self])
        self.device = self[0].blocks.device
        for table in self:
            _check_table(table, self.device)
        self.heights = tuple({table.blocks.shape[0]: None for table in self})
        self.max_context = min([_tokens_covered(table) for table in self])
        self.pointers = [table.blocks.data_ptr() for table in self]
        fields: list[int] = []
        for table in self:
            blocks = table.blocks
            per_block = table.group.block_size // table.tokens_per_entry
            fields += (blocks.data_ptr(), *blocks.stride(), blocks.shape[1], per_block)
        self.fields = tuple(fields)
        return self

    def moved(self) -> bool:
        """Whether a tensor has other memory now than when it was looked at (`resize_` and the like)."""
        return [table.blocks.data_ptr() for table in self] != self.pointers


def _check_table(table: BlockTable, device: torch.device) -> None:
    name, blocks = f"block table of group {table.group.name!r}", table.blocks
    if blocks.dtype != torch.int32:
        raise StepError(name, str(blocks.dtype), "torch.int32")
    if blocks.dim() != 2 or blocks.shape[1] == 0:
        raise StepError(name, f"shape {tuple(blocks.shape)}", "[rows, columns] with at least one column")
    if blocks.device != device:
        raise StepError(name, f"device {blocks.device}", f"{device} as the first group's table")


def _tokens_covered(table: BlockTable) -> int:
    """The longest context of a prefill or decode step that a table has columns for, in tokens."""
    columns, size = table.blocks.shape[1], table.tokens_per_entry
    if table.group.kind is not GroupKind.STATE:
        return columns * size
    # Only the first entry of a state group's block is looked at.
    return ((columns - 1) // (table.group.block_size // size) + 1) * table.group.block_size


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass as the host sees it.

    phase: PREFILL, DECODE or VERIFY.
    query_len: [B] new tokens of each row; at least 1, or 0 in every row for a dummy (warm-up) pass.
    prior_len: [B] tokens of each row that are in the cache before this pass.
    tables: one `BlockTable` for each cache group; `BlockTables` are taken as they are.
    position: [T] int32 or int64 rotary positions on the tables' device; None means prior_len + offset. Slots never
        come from it: a model's positions need not count tokens.
    padded_rows, padded_tokens: sizes that the kernels run at (a captured graph's); 0 means no padding.
    padded_chunks: convolution chunks that the plan's lists have room for at least, outside of decode.
    lengths_are_bounds: the host's lengths are upper bounds that give sizes, and the device's hold the values, with 0 of
        both for rows that are padding. For a decode or verify pass whose live rows are known on the device alone, as
        in a graph that replays on other lengths than it was captured with.
    contexts_on_device: `prior_len.device` holds context lengths, prior_len + query_len, which is what some hosts have
        there. In decode, where the lengths are no bounds.

    Everything below `padded_tokens` is derived. Raises `StepError` on anything that does not fit together.
    """

    phase: Phase
    query_len: Lengths
    prior_len: Lengths
    tables: tuple[BlockTable, ...]
    position: torch.Tensor | None = None
    padded_rows: int = 0
    padded_tokens: int = 0
    padded_chunks: int = 0
    lengths_are_bounds: bool = False
    contexts_on_device: bool = False
    num_rows: int = field(init=False)
    num_tokens: int = field(init=False)
    max_query: int = field(init=False)
    max_context: int = field(init=False)
    is_dummy: bool = field(init=False)
    block_tables: BlockTables = field(init=False)  # the tables again, as they were looked at
    groups: tuple[CacheGroup, ...] = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        tables, query = self.tables, self.query_len.host
        if not isinstance(tables, BlockTables) or tables.moved():
            tables = BlockTables(tables)
        num_tokens, max_query, max_context = _count_tokens(self.phase, query, self.prior_len.host)
        # One update: setting the fields of a frozen dataclass one by one costs several times as much.
        vars(self).update(
            tables=tables,
            block_tables=tables,
            num_rows=query.size,
            num_tokens=num_tokens,
            max_query=max_query,
            max_context=max_context,
            is_dummy=num_tokens == 0,
            groups=tables.groups,
            device=tables.device,
            padded_rows=self.padded_rows or query.size,
            padded_tokens=self.padded_tokens or num_tokens,
        )
        _check_padding(self)
        _check_sizes(self, tables)
        _check_device_values(self)

    @property
    def total_context(self) -> int:
        """Context tokens of all rows, new ones included."""
        return int(self.prior_len.host.sum(dtype=np.int64)) + self.num_tokens


def make_step(
    groups: Sequence[CacheGroup],
    phase: Phase,
    query_len: Lengths | Sequence[int],
    prior_len: Lengths | Sequence[int],
    tables: Mapping[str, torch.Tensor],
    *,
    granularity: Granularity | Mapping[str, Granularity] = Granularity.PHYSICAL,
    position: torch.Tensor | None = None,
    padded_rows: int = 0,
    padded_tokens: int = 0,
    padded_chunks: int = 0,
    lengths_are_bounds: bool = False,
    contexts_on_device: bool = False,
) -> Step:
    """A `Step` from tables by group name; `granularity` is one for all groups or one by group name.

    Raises `StepError` for a table of an unknown group, a group without a table, and all that `Step` checks.
    """
    names = [group.name for group in groups]
    if len(tables) != len(names) or any(name not in tables for name in names):
        _check_names(names, tables)
    if isinstance(granularity, Granularity):
        by_group = [BlockTable(group, tables[group.name], granularity) for group in groups]
    else:
        by_group = [BlockTable(group, tables[group.name], granularity[group.name]) for group in groups]
    return Step(
        phase=phase,
        query_len=query_len if isinstance(query_len, Lengths) else Lengths.of(query_len),
        prior_len=prior_len if isinstance(prior_len, Lengths) else Lengths.of(prior_len),
        tables=BlockTables(by_group),
        position=position,
        padded_rows=padded_rows,
        padded_tokens=padded_tokens,
        padded_chunks=padded_chunks,
        lengths_are_bounds=lengths_are_bounds,
        contexts_on_device=contexts_on_device,
    )


def _check_names(names: Sequence[str], tables: Mapping[str, torch.Tensor]) -> None:
    for name in tables:
        if name not in names:
            raise StepError("tables", f"group {name!r}", f"one of the groups {names}")
    for name in names:
        if name not in tables:
            raise StepError("tables", f"no table for group {name!r}", f"one table for each of the groups {names}")


@lru_cache(maxsize=4096)
def _ones(rows: int) -> bytes:
    return np.ones(rows, dtype=np.int32).tobytes()


def _count_tokens(phase: Phase, query: npt.NDArray[np.int32], prior: npt.NDArray[np.int32]) -> tuple[int, int, int]:
    """New tokens of all rows, the longest row's new tokens, and the longest context."""
    for name, values in (("query_len", query), ("prior_len", prior)):
        if values.dtype != np.int32 or values.ndim != 1:
            raise StepError(f"{name}.host", f"{values.dtype} {values.shape}", "int32 of one dimension")
    rows = query.size
    if rows == 0:
        raise StepError("query_len", "no rows", "at least one row")
    if prior.size != rows:
        raise StepError("prior_len", f"{prior.size} rows", f"{rows} rows as in query_len")
    # One new token a row is right in every phase, and by far the most frequent: a comparison of bytes instead of
    # four passes over the lengths. As unsigned numbers, negative lengths are beyond INT32_MAX too.
    if query.tobytes() == _ones(rows):
        longest = int(np.maximum.reduce(prior.view(np.uint32)))
        if longest < INT32_MAX:
            return rows, 1, longest + 1
    if rows <= FEW_ROWS:
        new, old = query.tolist(), prior.tolist()
        fewest, most, total = min(new), max(new), sum(new)
        shortest, longest = min(old), max(map(add, new, old))
    else:
        fewest, most, total = int(query.min()), int(query.max()), int(query.sum(dtype=np.int64))
        shortest, longest = int(prior.min()), int(np.add(query, prior, dtype=np.int64).max())
    if fewest < 1 or shortest < 0 or (phase is Phase.DECODE and most > 1):
        _check_lengths(phase, query, prior)
    if longest > INT32_MAX:
        raise StepError("prior_len + query_len", longest, f"at most {INT32_MAX} tokens a row")
    return total, most, longest


def _check_lengths(phase: Phase, query: npt.NDArray[np.int32], prior: npt.NDArray[np.int32]) -> None:
    """Say what is wrong with lengths, if they are not those of a dummy step."""
    if prior.min() < 0:
        row = int(prior.argmin())
        raise StepError(f"prior_len[{row}]", int(prior[row]), "0 or more tokens")
    if query.min() < 0:
        row = int(query.argmin())
        raise StepError(f"query_len[{row}]", int(query[row]), "0 or more tokens")
    if not query.any():
        if prior.any():
            row = int(prior.argmax())
            raise StepError(
                f"prior_len[{row}]", int(prior[row]), "0: a dummy step (no new tokens) has no context either"
            )
        return
    if query.min() == 0:
        row = int(query.argmin())
        raise StepError(
            f"query_len[{row}]", 0, "at least 1 new token in every row, or 0 in all of them for a dummy step"
        )
    if phase is Phase.DECODE and query.max() > 1:
        row = int(query.argmax())
        raise StepError(f"query_len[{row}]", int(query[row]), "1 new token a row in decode")


def _check_padding(step: Step) -> None:
    if step.padded_rows < step.num_rows:
        raise StepError("padded_rows", step.padded_rows, f"at least the {step.num_rows} rows of the step")
    if step.padded_tokens < step.num_tokens:
        raise StepError("padded_tokens", step.padded_tokens, f"at least the {step.num_tokens} tokens of the step")
    if step.padded_chunks and step.phase is Phase.DECODE:
        raise StepError("padded_chunks", step.padded_chunks, "0 in decode, which has no convolution chunks")


def _check_sizes(step: Step, tables: BlockTables) -> None:
    """Whether the tables have the rows and columns that the step's rows need."""
    for height in tables.heights:
        if height != step.num_rows and height != step.padded_rows:
            table = next(table for table in tables if table.blocks.shape[0] == height)
            raise StepError(
                f"block table of group {table.group.name!r}",
                f"{height} rows",
                f"{step.num_rows} rows as in query_len (or {step.padded_rows} padded rows)",
            )
    if step.max_context <= tables.max_context and step.phase is not Phase.VERIFY:
        return
    for table in tables:
        needed, columns = columns_needed(step, table), table.blocks.shape[1]
        if columns < needed:
            raise StepError(
                f"block table of group {table.group.name!r}",
                f"{columns} columns of {table.tokens_per_entry} tokens ({table.granularity.value} granularity)",
                f"at least {needed} for the longest context of {step.max_context} tokens",
            )


def columns_needed(step: Step, table: BlockTable) -> int:
    """Columns that the rows of a step look up in a group's table."""
    if step.is_dummy:
        return 0
    block_size = table.group.block_size
    if table.group.kind is not GroupKind.STATE:
        return -(-step.max_context // table.tokens_per_entry)
    if step.phase is Phase.VERIFY:
        # Verify stores each drafted token's state in a block of its own, past the block of the first one.
        last = int((step.prior_len.host // block_size + step.query_len.host - 1).max())
    else:
        last = (step.max_context - 1) // block_size
    return last * (block_size // table.tokens_per_entry) + 1


def _check_device_values(step: Step) -> None:
    if step.lengths_are_bounds and step.phase is Phase.PREFILL:
        raise StepError("phase", "prefill with bounds for lengths", "decode or verify: a prefill's lengths are known")
    if step.contexts_on_device and (step.phase is not Phase.DECODE or step.lengths_are_bounds):
        bounds = " with bounds for lengths" if step.lengths_are_bounds else ""
        raise StepError("contexts_on_device", f"a {step.phase.value} pass{bounds}", "a decode pass of known lengths")
    if step.contexts_on_device and step.prior_len.device is None:
        raise StepError("prior_len.device", "none", "context lengths, as contexts_on_device says")
    for name, lengths in (("query_len", step.query_len), ("prior_len", step.prior_len)):
        tensor = lengths.device
        if tensor is None:
            if step.lengths_are_bounds:
                raise StepError(f"{name}.device", "none", "the values of which the host's lengths are bounds")
            continue
        if tensor.dtype != torch.int32 or tensor.device != step.device:
            raise StepError(f"{name}.device", f"{tensor.dtype} on {tensor.device}", f"torch.int32 on {step.device}")
        if tensor.dim() != 1 or tensor.shape[0] not in (step.num_rows, step.padded_rows):
            raise StepError(
                f"{name}.device", f"shape {tuple(tensor.shape)}", f"[{step.num_rows}] or [{step.padded_rows}]"
            )
        if not tensor.is_contiguous():
            raise StepError(f"{name}.device", f"stride {tensor.stride(0)}", "lengths next to each other")
    position = step.position
    if position is None:
        return
    if position.dtype not in (torch.int32, torch.int64) or position.device != step.device:
        raise StepError(
            "position", f"{position.dtype} on {position.device}", f"torch.int32 or torch.int64 on {step.device}"
        )
    if position.dim() != 1 or position.shape[0] not in (step.num_tokens, step.padded_tokens):
        raise StepError("position", f"shape {tuple(position.shape)}", f"[{step.num_tokens}] or [{step.padded_tokens}]")
    if not position.is_contiguous():
        raise StepError("position", f"stride {position.stride(0)}", "positions next to each other")
