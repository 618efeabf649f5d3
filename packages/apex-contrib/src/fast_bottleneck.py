"""Apex's extension module of ResNet's bottleneck: the block, and its layers one by one.

``explicit_nhwc``: tensors are ``[N, H, W, C]`` and weights ``[K, R, S, C]``; else channels are
second. ``stride_1X1`` is the stride of the first layer, and of the identity's. Lists of tensors:

``inputs`` of a forward: x, w1, w2, w3, scale1, scale2, scale3, bias1, bias2, bias3, and where the
identity has a convolution w4, scale4, bias4. ``outputs`` of a forward: out1, out2, out3, after
the ReLU. ``inputs`` of a backward: those of the forward, then grad_o, out1, out2, out3. ``outputs``
of a backward: gradients of x, w1, w2, w3, and of w4. ``grad_out1`` and ``grad_out2`` are gradients
of what the first and second convolution give, before scale, bias and ReLU.

Nothing here has a gradient, and autocast changes nothing. Functions that end in ``halo`` have one
row more of a neighbour; those with thresholds (int tensors of one element) leave scale, bias and
ReLU out in rows before the first and from the second on, for a correction by the neighbour's row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as _functional
from torch.nn import grad as _convolution

from apex.contrib.bottleneck.raw import Layers as _Layers
from apex.contrib.bottleneck.raw import back as _back
from apex.contrib.bottleneck.raw import image as _image
from apex.contrib.bottleneck.raw import layers_of as _layers_of
from apex.contrib.bottleneck.raw import run as _run

__all__ = [
    "backward",
    "backward_grad_out1",
    "backward_grad_out1_halo",
    "backward_grad_out1_halo_corr",
    "backward_grad_out1_mask",
    "backward_grad_out2",
    "backward_init",
    "backward_rest",
    "backward_wgrad1",
    "backward_wgrad2",
    "backward_wgrad2_halo",
    "backward_wgrad2_pad",
    "backward_wgrad3",
    "forward",
    "forward_init",
    "forward_out1",
    "forward_out2",
    "forward_out2_halo",
    "forward_out2_halo_corr",
    "forward_out2_mask",
    "forward_out2_pad",
    "forward_rest",
]

_Tensors = Sequence[Tensor]


def _forward(
    name: str, nhwc: bool, stride: int, inputs: _Tensors, function: Callable, *images: Tensor
) -> Tensor:
    def computed(inputs: _Tensors, *images: Tensor) -> Tensor:
        layers = _layers_of(name, nhwc, stride, inputs, has_grad=False)
        return _back(nhwc, function(layers, *[_image(nhwc, t) for t in images]))

    return _run(inputs[0], computed, list(inputs), *images)


def _backward(
    name: str, nhwc: bool, stride: int, inputs: _Tensors, function: Callable, *images: Tensor
) -> list[Tensor]:
    def computed(inputs: _Tensors, *images: Tensor) -> list[Tensor]:
        layers = _layers_of(name, nhwc, stride, inputs, has_grad=True)
        results = function(layers, *[_image(nhwc, t) for t in images])
        return [_back(nhwc, t) for t in (results if isinstance(results, list) else [results])]

    return _run(inputs[0], computed, list(inputs), *images)


def forward(explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors) -> list[Tensor]:
    """The whole block: ``[out1, out2, out3]``."""
    outputs = forward_init(explicit_nhwc, stride_1X1, inputs)
    forward_out1(explicit_nhwc, stride_1X1, inputs, outputs)
    forward_out2(explicit_nhwc, stride_1X1, inputs, outputs)
    forward_rest(explicit_nhwc, stride_1X1, inputs, outputs)
    return outputs


def forward_init(explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors) -> list[Tensor]:
    """Memory for ``[out1, out2, out3]``."""
    layers = _layers_of("forward_init", explicit_nhwc, stride_1X1, inputs, has_grad=False)
    made = [layers.x.new_empty(size) for size in layers.sizes()]
    return [_back(explicit_nhwc, t) for t in made]


def forward_out1(explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors, outputs: _Tensors) -> None:
    """Write out1."""
    given = explicit_nhwc, stride_1X1, inputs
    outputs[0].copy_(_forward("forward_out1", *given, lambda layers: layers.layer(0, layers.x)))


def forward_out2(explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors, outputs: _Tensors) -> None:
    """Write out2, of out1 with a row and a column of zeros on each side."""
    given = explicit_nhwc, stride_1X1, inputs
    layer = lambda layers, out1: layers.layer(1, out1, 1)
    outputs[1].copy_(_forward("forward_out2", *given, layer, outputs[0]))


def _rows_between(y: Tensor, inside: Tensor, top: Tensor, bottom: Tensor) -> Tensor:
    rows = torch.arange(y.shape[2], device=y.device).view(-1, 1)
    return torch.where((rows >= top) & (rows < bottom), inside, y)


def forward_out2_mask(
    explicit_nhwc: bool,
    stride_1X1: int,
    inputs: _Tensors,
    outputs: _Tensors,
    thresholdTop: Tensor,
    thresholdBottom: Tensor,
) -> None:
    """Write out2; outside the thresholds, what the convolution gives."""

    def layer(layers: _Layers, out1: Tensor) -> Tensor:
        y = layers.convolve(1, out1, 1)
        return _rows_between(y, layers.finish(1, y).relu(), thresholdTop, thresholdBottom)

    given = explicit_nhwc, stride_1X1, inputs
    outputs[1].copy_(_forward("forward_out2_mask", *given, layer, outputs[0]))


def forward_out2_halo(explicit_nhwc: bool, fat_halo_y1: Tensor, inputs: _Tensors) -> Tensor:
    """One row of out2, of three rows of out1."""
    layer = lambda layers, rows: layers.layer(1, rows, (0, 1))
    return _forward("forward_out2_halo", explicit_nhwc, 1, inputs, layer, fat_halo_y1)


def forward_out2_halo_corr(
    explicit_nhwc: bool,
    slim_halo_y1: Tensor,
    inputs: _Tensors,
    w1by3: Tensor,
    out2_part_halo: Tensor,
) -> Tensor:
    """A row of out2, of what the convolution gave without the neighbour's row, and that row.

    ``w1by3`` is the row of w2 that lies on the neighbour's.
    """

    def layer(layers: _Layers, row: Tensor, weight: Tensor, part: Tensor) -> Tensor:
        y = _functional.conv2d(row, weight, None, 1, (0, 1)) + part
        return layers.finish(1, y).relu()

    images = slim_halo_y1, w1by3, out2_part_halo
    return _forward("forward_out2_halo_corr", explicit_nhwc, 1, inputs, layer, *images)


def forward_out2_pad(
    explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors, outputs: _Tensors, out1_pad: Tensor
) -> None:
    """Write out2, of out1 with the neighbours' rows around it."""
    layer = lambda layers, rows: layers.layer(1, rows, (0, 1))
    given = explicit_nhwc, stride_1X1, inputs
    outputs[1].copy_(_forward("forward_out2_pad", *given, layer, out1_pad))


def forward_rest(explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors, outputs: _Tensors) -> None:
    """Write out3, of out2."""
    given = explicit_nhwc, stride_1X1, inputs
    outputs[2].copy_(_forward("forward_rest", *given, _Layers.last, outputs[1]))


def backward(explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors) -> list[Tensor]:
    """The whole block: gradients of x, w1, w2, w3, and of w4 if there is one."""
    outputs = backward_init(explicit_nhwc, stride_1X1, inputs)
    given = explicit_nhwc, stride_1X1, inputs, outputs
    grad_out2 = backward_grad_out2(*given)
    grad_out1 = backward_grad_out1(*given, grad_out2)
    backward_wgrad3(*given)
    backward_wgrad2(*given, grad_out2)
    backward_wgrad1(*given, grad_out1)
    backward_rest(*given, grad_out2, grad_out1)
    return outputs


def backward_init(explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors) -> list[Tensor]:
    """Memory for the gradients of x, w1, w2, w3, and of w4 if there is one."""
    layers = _layers_of("backward_init", explicit_nhwc, stride_1X1, inputs, has_grad=True)
    return [_back(explicit_nhwc, torch.empty_like(t)) for t in (layers.x, *layers.weights)]


def backward_grad_out2(
    explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors, outputs: _Tensors
) -> Tensor:
    """``grad_out2``."""
    given = explicit_nhwc, stride_1X1, inputs
    return _backward("backward_grad_out2", *given, _Layers.grad_out2)[0]


def backward_grad_out1(
    explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors, outputs: _Tensors, grad_out2: Tensor
) -> Tensor:
    """``grad_out1``."""
    layer = lambda layers, dy: layers.before(0, layers.of_conv2(dy), layers.outs[0])
    given = explicit_nhwc, stride_1X1, inputs
    return _backward("backward_grad_out1", *given, layer, grad_out2)[0]


def backward_grad_out1_mask(
    explicit_nhwc: bool,
    stride_1X1: int,
    inputs: _Tensors,
    outputs: _Tensors,
    grad_out2: Tensor,
    thresholdTop: Tensor,
    thresholdBottom: Tensor,
) -> Tensor:
    """``grad_out1``; outside the thresholds, the gradient of out1."""

    def layer(layers: _Layers, dy: Tensor) -> Tensor:
        dx = layers.of_conv2(dy)
        inside = layers.before(0, dx, layers.outs[0])
        return _rows_between(dx, inside, thresholdTop, thresholdBottom)

    given = explicit_nhwc, stride_1X1, inputs
    return _backward("backward_grad_out1_mask", *given, layer, grad_out2)[0]


def backward_grad_out1_halo(
    explicit_nhwc: bool,
    stride_1X1: int,
    inputs: _Tensors,
    outputs: _Tensors,
    grad_out2_halo: Tensor,
    relu1_halo: Tensor,
) -> Tensor:
    """One row of ``grad_out1``, of three rows of ``grad_out2``, and that row of out1."""

    def layer(layers: _Layers, dy: Tensor, out1: Tensor) -> Tensor:
        return layers.before(0, layers.of_conv2(dy)[:, :, 1:2], out1)

    given = explicit_nhwc, stride_1X1, inputs
    images = grad_out2_halo, relu1_halo
    return _backward("backward_grad_out1_halo", *given, layer, *images)[0]


def backward_grad_out1_halo_corr(
    explicit_nhwc: bool,
    stride_1X1: int,
    inputs: _Tensors,
    w1by3: Tensor,
    outputs: _Tensors,
    grad_out2_halo: Tensor,
    relu1_halo: Tensor,
    part_grad_out1: Tensor,
) -> Tensor:
    """A row of ``grad_out1``, of out1's gradient without the neighbour's row, and that row.

    ``w1by3`` is the row of w2 that lies on this rank's row when the neighbour convolves.
    """

    def layer(layers: _Layers, weight: Tensor, dy: Tensor, out1: Tensor, part: Tensor) -> Tensor:
        dx = _convolution.conv2d_input(part.shape, weight, dy, 1, (0, 1)) + part
        return layers.before(0, dx, out1)

    given = explicit_nhwc, stride_1X1, inputs
    images = w1by3, grad_out2_halo, relu1_halo, part_grad_out1
    return _backward("backward_grad_out1_halo_corr", *given, layer, *images)[0]


def backward_wgrad2_pad(
    explicit_nhwc: bool,
    stride_1X1: int,
    inputs: _Tensors,
    outputs: _Tensors,
    input: Tensor,
    grad_out2: Tensor,
) -> None:
    """Write the gradient of w2; ``input`` is out1 with the neighbours' rows around it."""
    layer = lambda layers, rows, dy: layers.wgrad(1, rows, dy, (0, 1))
    given = explicit_nhwc, stride_1X1, inputs
    outputs[2].copy_(_backward("backward_wgrad2_pad", *given, layer, input, grad_out2)[0])


def backward_wgrad2(
    explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors, outputs: _Tensors, grad_out2: Tensor
) -> None:
    """Write the gradient of w2."""
    layer = lambda layers, dy: layers.wgrad(1, layers.outs[0], dy, 1)
    given = explicit_nhwc, stride_1X1, inputs
    outputs[2].copy_(_backward("backward_wgrad2", *given, layer, grad_out2)[0])


def backward_wgrad2_halo(
    explicit_nhwc: bool,
    stride_1X1: int,
    inputs: _Tensors,
    outputs: _Tensors,
    input: Tensor,
    grad_out2_halo: Tensor,
) -> Tensor:
    """The part of w2's gradient of a row of ``grad_out2``, given three rows of out1."""
    layer = lambda layers, rows, dy: layers.wgrad(1, rows, dy, (0, 1))
    given = explicit_nhwc, stride_1X1, inputs
    return _backward("backward_wgrad2_halo", *given, layer, input, grad_out2_halo)[0]


def backward_wgrad3(
    explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors, outputs: _Tensors
) -> None:
    """Write the gradient of w3."""

    def layer(layers: _Layers) -> Tensor:
        return layers.wgrad(2, layers.outs[1], layers.before_last_relu() * layers.scales[2])

    given = explicit_nhwc, stride_1X1, inputs
    outputs[3].copy_(_backward("backward_wgrad3", *given, layer)[0])


def backward_wgrad1(
    explicit_nhwc: bool, stride_1X1: int, inputs: _Tensors, outputs: _Tensors, grad_out1: Tensor
) -> None:
    """Write the gradient of w1."""
    layer = lambda layers, dy: layers.wgrad(0, layers.x, dy)
    given = explicit_nhwc, stride_1X1, inputs
    outputs[1].copy_(_backward("backward_wgrad1", *given, layer, grad_out1)[0])


def backward_rest(
    explicit_nhwc: bool,
    stride_1X1: int,
    inputs: _Tensors,
    outputs: _Tensors,
    grad_out2: Tensor,
    grad_out1: Tensor,
) -> None:
    """Write the gradient of x, and of w4 if there is one; ``grad_out2`` is not used."""
    given = explicit_nhwc, stride_1X1, inputs
    dx, *others = _backward("backward_rest", *given, _Layers.rest, grad_out1)
    outputs[0].copy_(dx)
    for output, gradient in zip(outputs[4:], others, strict=True):
        output.copy_(gradient)
