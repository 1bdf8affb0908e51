"""The pass that gives products of one input one launch: the same results, and nothing joined that must not be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, library
from torch.fx.experimental.proxy_tensor import make_fx

from stepbind.ops.join_linear import JOIN_LINEAR
from stepbind.ops.linear import ARRIVALS, few_rows_linear, joined_linear

INPUTS = [torch.randn(shape) for shape in ((1, 3, 16), (1, 3, 16), (24, 16), (24, 16), (16, 24), (24,))]
INPUTS.append(torch.zeros(ARRIVALS, dtype=torch.int32))


def gated_mlp(*inputs: torch.Tensor) -> torch.Tensor:
    x, y, gate, up, down, bias, arrived = inputs
    inner = few_rows_linear(x, gate, None, arrived).sigmoid() * few_rows_linear(x, up, bias, arrived)
    return y + few_rows_linear(inner, down, None, arrived)


def of_two_inputs(*inputs: torch.Tensor) -> torch.Tensor:
    x, y, one, other, _, bias, arrived = inputs
    return few_rows_linear(x, one, None, arrived) + few_rows_linear(y, other, bias, arrived)


def with_a_weight_made_on_the_way(*inputs: torch.Tensor) -> torch.Tensor:
    x, _, one, other, _, _, arrived = inputs
    first = few_rows_linear(x, one, None, arrived)
    return first + few_rows_linear(x, other * first.mean(), None, arrived)


def calls(graph: fx.Graph, op: object) -> int:
    return len(graph.find_nodes(op="call_function", target=op))


@pytest.mark.parametrize(
    ("compute", "singles", "joined"), [(gated_mlp, 1, 1), (of_two_inputs, 2, 0), (with_a_weight_made_on_the_way, 2, 0)]
)
def test_products_of_one_input_and_given_weights_are_joined(
    compute: Callable[..., torch.Tensor], singles: int, joined: int
) -> None:
    module = make_fx(compute, tracing_mode="fake")(*INPUTS)
    JOIN_LINEAR(module.graph)
    module.graph.lint()
    module.recompile()
    assert calls(module.graph, torch.ops.stepbind.few_rows_linear.default) == singles
    assert calls(module.graph, torch.ops.stepbind.joined_linear.default) == joined
    torch.testing.assert_close(module(*INPUTS), compute(*INPUTS), atol=0, rtol=0)


def test_the_joined_op_is_what_torch_asks_of_an_op() -> None:
    x, _, one, other, _, bias, arrived = INPUTS
    library.opcheck(joined_linear, (x, [one, other[:8]], [bias, None], arrived))
