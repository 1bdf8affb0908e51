"""A model's linear modules by products of few rows: the same results, and nothing of it left afterwards."""

from __future__ import annotations

import pytest
import torch

from stepbind.ops import linear
from stepbind.ops.linear import ARRIVALS, few_rows_linears
from stepbind.tiny import tiny_model

IDS = torch.arange(1)[None]
ARRIVED = torch.zeros(ARRIVALS, dtype=torch.int32)


@pytest.fixture
def a_gpu_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "fits", lambda device: True)


def own_forwards(model: torch.nn.Module) -> int:
    return sum("forward" in vars(module) for module in model.modules())


def test_nothing_is_swapped_where_the_products_do_not_fit() -> None:
    model = tiny_model("qwen3").bfloat16()
    with few_rows_linears(model, 1, ARRIVED):
        assert own_forwards(model) == 0


@pytest.mark.usefixtures("a_gpu_that_fits")
def test_linear_modules_are_swapped_inside_and_put_back() -> None:
    model = tiny_model("qwen3").bfloat16()
    before = model(IDS).logits
    with few_rows_linears(model, 1, ARRIVED):
        assert own_forwards(model) == 7 * 3 + 1  # of three layers, and the head
        torch.testing.assert_close(model(IDS).logits, before, atol=0, rtol=0)
    assert own_forwards(model) == 0


@pytest.mark.usefixtures("a_gpu_that_fits")
def test_an_error_inside_puts_them_back_too() -> None:
    model = tiny_model("qwen3").bfloat16()
    with pytest.raises(IndexError), few_rows_linears(model, 1, ARRIVED):
        model(IDS + 10**6)
    assert own_forwards(model) == 0


@pytest.mark.usefixtures("a_gpu_that_fits")
@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 1), (torch.bfloat16, 33)])
def test_float32_weights_and_many_rows_stay_with_the_library(dtype: torch.dtype, rows: int) -> None:
    model = tiny_model("qwen3").to(dtype)
    with few_rows_linears(model, rows, ARRIVED):
        assert own_forwards(model) == 0


@pytest.mark.usefixtures("a_gpu_that_fits")
def test_a_forward_that_somebody_else_set_stays() -> None:
    model = tiny_model("qwen3").bfloat16()
    head = model.get_output_embeddings()
    head.forward = own = head.forward
    with few_rows_linears(model, 1, ARRIVED):
        assert head.forward is own
    assert head.forward is own
