"""What doctor says of attention on a GPU: which kernel, and why. Which machine it is on is made up here."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from stepbind import doctor
from stepbind.doctor import Choice
from stepbind.ops import varlen_attention

PREFILL, DECODE = "paged attention, prefill", "paged attention, decode"


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(varlen_attention, "unsupported", lambda device: None)


def choice(op: str) -> Choice:
    (found,) = (each for each in doctor.choices() if each.op == op and each.device == "cuda")
    return found


def test_prefill_is_ours_where_the_library_was_not_measured_faster() -> None:
    with patch.dict(varlen_attention.FASTER_FROM, clear=True):
        found = choice(PREFILL)
    assert found.kernel == "Triton"
    assert "was not measured faster" in found.why


def test_prefill_is_the_librarys_where_it_was() -> None:
    with patch.dict(varlen_attention.FASTER_FROM, {128: 512, 256: 2048}, clear=True):
        found = choice(PREFILL)
    assert found.kernel == "torch varlen, Triton"
    assert "head dims of 128 (from 512 tokens), 256 (from 2048 tokens), where it was measured faster" in found.why


def test_prefill_is_ours_where_the_library_does_not_run_even_if_it_is_faster_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(varlen_attention, "unsupported", lambda device: "it was not measured on AMD")
    with patch.dict(varlen_attention.FASTER_FROM, {128: 512}, clear=True):
        found = choice(PREFILL)
    assert found.kernel == "Triton"
    assert found.why.endswith("is not used: it was not measured on AMD")


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("has_pages", [True, False])
def test_decode_is_ours_whatever_is_installed(
    installed: bool, has_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_torch_2_11(query: torch.Tensor) -> None: ...

    def of_torch_2_13(query: torch.Tensor, block_table: torch.Tensor) -> None: ...

    monkeypatch.setattr(doctor, "varlen_attn", of_torch_2_13 if has_pages else of_torch_2_11)
    monkeypatch.setattr(doctor, "find_spec", lambda name: object() if installed else None)
    found = choice(DECODE)
    assert found.kernel == "Triton"
    assert f"{'has one' if has_pages else 'has none'}, FlashInfer {'is' if installed else 'is not'} installed" in (
        found.why
    )
    assert "follows a table's entries unchecked" in found.why


@pytest.mark.parametrize(("native", "kernel"), [(None, "numpy"), (object(), "C, numpy")])
def test_binds_for_atom_say_whether_the_compiled_part_is_there(
    native: object, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "native", native)
    (found,) = (each for each in doctor.choices() if each.op == "bind for ATOM")
    assert (found.device, found.kernel) == ("cpu", kernel)
