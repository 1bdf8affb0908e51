"""The rows of the reference's behaviour on block tables: physical and kernel blocks (of 2 tokens here), the store's
table, and widths that do not tell which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stepbind.errors import StepError
from tests.targets.atom_double.case import (
    CLASSES,
    DECODE_TABLE,
    LATENT,
    Case,
    capture,
    decode,
)
from tests.targets.atom_double.modules import Ambient, atom_installed
from tests.targets.atom_double.passes import int32, pass_inputs, positions_of


@pytest.fixture(autouse=True)
def ambient() -> Iterator[Ambient]:
    with atom_installed() as state:
        yield state


KERNEL = [[16, 17, 18, 19, 0, 0, 0, 0], [28, 29, 30, 31, 36, 37, 38, 39], [8, 9, 10, 11, -1, -1, -1, -1]]


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_row_4_the_physical_table_is_every_fourth_kernel_block_divided_by_four(cls: Any) -> None:
    inputs = pass_inputs(prefill=True, query=[3, 4, 1], prior=[0, 5, 2], tables=[KERNEL])
    case = Case(cls, inputs, positions_of([3, 4, 1], [0, 5, 2]), ratio=4)
    assert case.plugin().block_table.tolist() == [[4, 0], [7, 9], [2, -1]]
    compact = Case(cls, inputs, case.positions, ratio=4)
    compact.attention.kv_cache_kernel_block_id_device = int32([[4, 0, 0], [7, 9, 0], [2, -1, 0]])
    assert compact.plugin().block_table.tolist() == [[4, 0, 0], [7, 9, 0], [2, -1, 0]]
    uneven = Case(cls, inputs, case.positions, ratio=4)
    uneven.runtime.kv_cache.kernel_seq_size_per_block = 3
    with pytest.raises(StepError, match="kernel_seq_size_per_block: got 3, expected a divisor of the block size 8"):
        uneven.build()


def test_row_5_the_indexer_gets_the_table_in_kernel_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = [[4, 0], [7, 9], [2, -1]]
    inputs = pass_inputs(prefill=True, query=[3, 4, 1], prior=[0, 5, 2], tables=[KERNEL], store=store)
    case = Case(LATENT, inputs, positions_of([3, 4, 1], [0, 5, 2]), ratio=4)
    expanded = [[16, 17, 18, 19, 0, 1, 2, 3], *KERNEL[1:]]
    assert case.build().attn_metadata.block_tables.tolist() == expanded
    case = decode(LATENT, KERNEL, [2, 14, 3], ratio=4)
    capture(monkeypatch)
    assert case.build(cg_max_seq_len=16).attn_metadata.block_tables.tolist() == expanded
    # A table of two columns is wide enough for contexts of 4 tokens in kernel blocks of 2, and used as it is.
    assert case.build(cg_max_seq_len=4).attn_metadata.block_tables.tolist() == [[4, 0], [7, 9], [2, -1]]


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_row_6_a_capture_never_takes_the_stores_table(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = [[1, 1, 1]] * 3
    case = decode(cls, store=stale)
    assert case.plugin().block_table.tolist() == stale
    capture(monkeypatch)
    assert case.plugin(cg_max_seq_len=24).block_table.tolist() == DECODE_TABLE
    assert case.plugin(cg_max_seq_len=24).slot_mapping.tolist() == [39, 72, 40]
    case = decode(cls, KERNEL, [2, 14, 3], ratio=4, store=[[1, 1]] * 3)
    assert case.plugin(cg_max_seq_len=16).block_table.tolist() == [[4, 0], [7, 9], [2, -1]]
    assert case.plugin(cg_max_seq_len=16).slot_mapping.tolist() == [34, 78, 19]


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_row_24_a_compact_table_whose_columns_divide_is_not_squeezed_again(cls: Any) -> None:
    """Four physical columns, four kernel blocks in each: 30 tokens of context would not fit four kernel blocks of 2."""
    inputs = pass_inputs(prefill=True, query=[2], prior=[28], tables=[[[4, 7, 9, 5]]])
    case = Case(cls, inputs, positions_of([2], [28]), ratio=4)
    assert case.plugin().block_table.tolist() == [[4, 7, 9, 5]]
    assert case.plugin().slot_mapping.tolist() == [44, 45]


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_row_24_what_stays_ambiguous_is_an_error(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [[4, 7, 9, 5]]
    case = Case(cls, pass_inputs(prefill=False, query=[1], prior=[3], tables=[table], store=table), int32([3]), ratio=4)
    assert case.plugin().slot_mapping.tolist() == [35]  # eagerly the store's table tells
    capture(monkeypatch)
    with pytest.raises(StepError, match="got 4 columns, as many as the physical table"):
        case.build(cg_max_seq_len=32)
