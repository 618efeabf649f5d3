"""Dense layers and their gradients without autograd, as ``fused_dense_cuda`` has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from apex.contrib._shared.native.composed import plainly
from apex.contrib._shared.native.half_matmul import needs_float32
from apex.contrib.dense_epilogue.layer import dense_forward
from apex.contrib.dense_epilogue.products import check_input, check_layer, linear_gradients

from . import fused_dense as layers


def dense(name: str, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    check_input(name, input)
    check_layer(name, input, input.shape[-1], weight, bias)
    run = lambda x, *others: dense_forward(None, x, *others)
    return _run(run, [weight], input, weight, bias)[0]


def dense_gradients(name: str, input: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    check_input(name, input)
    columns = check_layer(name, input, input.shape[-1], weight, None)
    _check_result(name, "d_output", dy, input, columns)
    run = lambda dy, *saved: linear_gradients(None, (True,) * 3, dy, saved)
    return _run(run, [weight], dy, input, weight)


def gelu_dense(
    name: str, input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> list[Tensor]:
    """GELU's output, the output, and GELU's input."""
    check_input(name, input)
    columns = check_layer(name, input, input.shape[-1], weight1, bias1, ("weight1", "bias1"))
    check_layer(name, input, columns, weight2, bias2, ("weight2", "bias2"))
    run = lambda x, *others: layers._gelu_dense_forward(None, x, *others)
    output, gelu_in, hidden = _run(run, [weight1, weight2], input, weight1, bias1, weight2, bias2)
    return [hidden, output, gelu_in]


def gelu_dense_gradients(
    name: str,
    input: Tensor,
    gelu_in: Tensor,
    hidden: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    dy: Tensor,
) -> list[Tensor]:
    check_input(name, input)
    columns = check_layer(name, input, input.shape[-1], weight1, None, ("weight1", ""))
    of_output = check_layer(name, input, columns, weight2, None, ("weight2", ""))
    for argument, tensor in (("gelu_in", gelu_in), ("output1", hidden)):
        _check_result(name, argument, tensor, input, columns)
    _check_result(name, "d_output2", dy, input, of_output)

    def run(dy: Tensor, x: Tensor, w1: Tensor, w2: Tensor, *kept: Tensor) -> Sequence[Tensor]:
        saved = (x, w1, None, w2, None, *[t.contiguous() for t in kept])
        return layers._gelu_dense_backward(None, (True,) * 5, dy, saved)

    return _run(run, [weight1, weight2], dy, input, weight1, weight2, gelu_in, hidden)


def _check_result(name: str, argument: str, tensor: Tensor, input: Tensor, columns: int) -> None:
    expected = (*input.shape[:-1], columns)
    if tensor.shape != expected or tensor.dtype != input.dtype or tensor.device != input.device:
        raise ValueError(
            f"{name}: {argument} must be {input.dtype} {list(expected)} on {input.device}, got "
            f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}."
        )


def _run(
    function: Callable[..., Sequence[Tensor]], weights: list[Tensor], *tensors: Tensor
) -> list[Tensor]:
    """Call a function without gradients and autocast, in float32 where 16 bits would be slow."""
    dtype = tensors[0].dtype
    if needs_float32(tensors[0], *weights):
        tensors = tuple(t.float() for t in tensors)
    with torch.no_grad():
        results = plainly(tensors[0], function, *tensors)
    return [result.to(dtype) for result in results]
