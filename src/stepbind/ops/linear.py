"""Products of few rows with a weight: bound by reading the weight, which a library's general product does not reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import library, nn
from torch.nn.functional import linear

ENABLED = True
"""False leaves all products to the library, to compare."""
MAX_ROWS = 32
"""The most rows that were tried (on an H200): a graph of more rows keeps the library's products."""
ARRIVALS = 132
"""Counters that one product may need: one for each of an H200's multiprocessors."""


SHARED_BYTES = 144 * 1024
"""Shared memory that the tiles of one program may take: 123 KB of them at 32 rows."""


@library.custom_op("stepbind::few_rows_linear", mutates_args=())
def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor
) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N] in x's dtype, summed in float32.

    arrived: [ARRIVALS] int32 zeros, left as zeros; calls that share it must not overlap. Nothing for torch.compile to
    look into. On CPU tensors, and for shapes that the kernels do not serve, it is torch's product.
    """
    if x.is_cuda:
        from stepbind.ops import triton_linear

        if triton_linear.serves(x.numel() // x.shape[-1], weight.shape[0], weight.shape[1]):
            return triton_linear.few_rows_linear(x, (weight,), (bias,), arrived)[0]
    return linear(x, weight, bias)


@few_rows_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@library.custom_op("stepbind::joined_linear", mutates_args=())
def joined_linear(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None], arrived: torch.Tensor
) -> list[torch.Tensor]:
    """`few_rows_linear` of x [..., K] with each weight [N, K] and its bias [N]: the same numbers, each result a tensor
    of its own, in one launch where the kernels serve all of them together."""
    if x.is_cuda:
        from stepbind.ops import triton_linear

        rows, widths = x.numel() // x.shape[-1], tuple(weight.shape[0] for weight in weights)
        if triton_linear.serves_together(rows, widths, x.shape[-1]):
            return list(triton_linear.few_rows_linear(x, tuple(weights), tuple(biases), arrived))
    return [few_rows_linear(x, weight, bias, arrived) for weight, bias in zip(weights, biases, strict=True)]


@joined_linear.register_fake
def _(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None], arrived: torch.Tensor
) -> list[torch.Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


def serves_model(model: Any, rows: int) -> bool:
    """Whether such a model's products of so many rows are ours: 16-bit weights, on a GPU that they fit."""
    return ENABLED and rows <= MAX_ROWS and model.dtype in (torch.bfloat16, torch.float16) and fits(model.device)


def fits(device: torch.device) -> bool:
    """Whether a device is a GPU like the one that the products were measured on: NVIDIA, with room for the tiles under
    way and a multiprocessor for each program."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    properties: Any = torch.cuda.get_device_properties(device)
    return bool(
        properties.multi_processor_count >= ARRIVALS and properties.shared_memory_per_block_optin >= SHARED_BYTES
    )


@contextmanager
def few_rows_linears(model: nn.Module, rows: int, arrived: torch.Tensor) -> Iterator[None]:
    """The model's plain `nn.Linear` modules call `few_rows_linear` inside the block, where its kernels gained at
    their shape and the weights have 16 bits; everything else of the modules stays. Undone on every exit."""
    if not serves_model(model, rows):
        yield
        return
    from stepbind.ops import triton_linear

    # One function for all modules, so that torch.compile sees layers of a kind as the same code.
    def forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = few_rows_linear(input, module.weight, module.bias, arrived)
        return out

    with ExitStack() as undo:
        for module in model.modules():
            if _is_plain(module) and triton_linear.serves(rows, module.out_features, module.in_features):
                module.forward = MethodType(forward, module)  # type: ignore[method-assign]
                undo.callback(delattr, module, "forward")
        yield


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is torch's linear layer with its own forward and a 16-bit weight as one contiguous tensor."""
    if type(module) is not nn.Linear or "forward" in vars(module) or type(module.weight.data) is not torch.Tensor:
        return False
    return module.weight.dtype in (torch.bfloat16, torch.float16) and module.weight.is_contiguous()
