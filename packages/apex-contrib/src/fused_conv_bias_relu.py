"""Apex's extension module of convolutions: its positional signatures over this wheel's functions.

Importable only where the kernels can run, because callers take the import as that answer. Nothing
here has a gradient, and autocast changes nothing. ``inputs`` are lists of tensors, whose shapes,
dtypes and errors are those of :mod:`apex.contrib.conv_bias_relu`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from apex.contrib._ops import library
from apex.contrib.conv_bias_relu import conv_bias_relu as _functions
from apex.contrib.conv_bias_relu.operands import check_convolution as _check_convolution
from apex.contrib.conv_bias_relu.operands import check_like as _check_like
from apex.contrib.conv_bias_relu.operands import pair as _pair

library.require_for_import(__name__, "dense_epilogue")

__all__ = [
    "backward",
    "backward_cscale_cbias_relu",
    "backward_no_relu",
    "forward",
    "forward_cscale_cbias_relu",
    "forward_mask",
    "forward_no_relu",
]


def forward(inputs: Sequence[Tensor], padding: int, stride: int) -> list[Tensor]:
    """``[relu(conv + bias)]`` of ``x, weight, bias``."""
    return _forward("forward", True, inputs, ("x", "weight", "bias"), padding, stride)


def forward_no_relu(inputs: Sequence[Tensor], padding: int, stride: int) -> list[Tensor]:
    """``[conv + bias]`` of ``x, weight, bias``."""
    return _forward("forward_no_relu", False, inputs, ("x", "weight", "bias"), padding, stride)


def forward_mask(inputs: Sequence[Tensor], padding: int, stride: int) -> list[Tensor]:
    """``[relu((conv + bias) * mask)]`` of ``x, weight, bias, mask``."""
    names = ("x", "weight", "bias", "mask")
    return _forward("forward_mask", True, inputs, names, padding, stride)


def forward_cscale_cbias_relu(inputs: Sequence[Tensor], padding: int, stride: int) -> list[Tensor]:
    """``[relu(conv * scale + bias)]`` of ``x, weight, scale, bias``."""
    names = ("x", "weight", "scale", "bias")
    return _forward("forward_cscale_cbias_relu", True, inputs, names, padding, stride)


def backward(inputs: Sequence[Tensor], padding: int, stride: int) -> list[Tensor]:
    """Gradients of x, weight and bias, of ``x, weight, output, grad_output``.

    It is the backward of :func:`forward_mask` too, for a mask of zeros and ones.
    """
    names = ("x", "weight", "output", "grad_output")
    return _backward("backward", inputs, names, padding, stride)


def backward_no_relu(inputs: Sequence[Tensor], padding: int, stride: int) -> list[Tensor]:
    """Gradients of x, weight and bias, of ``x, weight, grad_output``."""
    return _backward("backward_no_relu", inputs, ("x", "weight", "grad_output"), padding, stride)


def backward_cscale_cbias_relu(inputs: Sequence[Tensor], padding: int, stride: int) -> list[Tensor]:
    """Gradients of x and weight, of ``x, weight, scale, output, grad_output``."""
    names = ("x", "weight", "scale", "output", "grad_output")
    return _backward("backward_cscale_cbias_relu", inputs, names, padding, stride)[:2]


def _named(name: str, inputs: Sequence[Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    if len(inputs) != len(names):
        raise ValueError(
            f"{name}: inputs must be {', '.join(names)}, but there are {len(inputs)} tensors."
        )
    return dict(zip(names, inputs, strict=True))


def _forward(
    name: str,
    has_relu: bool,
    inputs: Sequence[Tensor],
    names: tuple[str, ...],
    padding: int,
    stride: int,
) -> list[Tensor]:
    given = _named(name, inputs, names)
    x, weight, bias = given["x"], given["weight"], given["bias"]
    scale, mask = given.get("scale"), given.get("mask")
    option = _functions.check(name, has_relu, x, weight, bias, padding, stride, scale, mask)
    scale = None if scale is None else scale.reshape(-1)
    return [_functions.run(option, x, weight, scale, bias.reshape(-1), mask)]


def _backward(
    name: str, inputs: Sequence[Tensor], names: tuple[str, ...], padding: int, stride: int
) -> list[Tensor]:
    given = _named(name, inputs, names)
    x, weight, dy = given["x"], given["weight"], given["grad_output"]
    _check_convolution(name, x, weight)
    kept = [given["output"]] if "output" in given else []
    for argument, tensor in zip(("grad_output", "output"), [dy, *kept], strict=False):
        _check_like(name, argument, tensor, x)
        if tensor.shape != dy.shape or tensor.dim() != 4 or tensor.shape[1] != weight.shape[0]:
            raise ValueError(
                f"{name}: {argument} must have the output's shape [N, {weight.shape[0]}, H, W], "
                f"got {list(tensor.shape)}."
            )
    scale = given["scale"].reshape(-1) if "scale" in given else None
    option = bool(kept), _pair(name, "padding", padding, 0), _pair(name, "stride", stride, 1)
    return _functions.gradients(option, dy, x, weight, scale, None, None, *kept)
