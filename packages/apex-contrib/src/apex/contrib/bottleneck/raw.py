"""A bottleneck's layers and their gradients one by one, as ``fast_bottleneck`` has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn import grad as convolution

from .._shared.native.composed import plainly
from .._shared.native.half_matmul import is_slow

__all__ = ["Layers", "back", "image", "layers_of", "run"]

FORWARD = "x, w1, w2, w3, scale1, scale2, scale3, bias1, bias2, bias3"
BACKWARD = "grad_o, out1, out2, out3"


def image(nhwc: bool, tensor: Tensor) -> Tensor:
    """``[N, C, H, W]`` of what the caller has."""
    return tensor.movedim(-1, 1) if nhwc else tensor


def back(nhwc: bool, tensor: Tensor) -> Tensor:
    """What the caller has, of ``[N, C, H, W]``."""
    return tensor.movedim(1, -1).contiguous() if nhwc else tensor


class Layers(NamedTuple):
    """``x``, and of each layer, three or four, weight, scale and bias; what the backward has."""

    stride: int
    x: Tensor
    weights: list[Tensor]
    scales: list[Tensor]
    biases: list[Tensor]
    grad_o: Tensor
    outs: list[Tensor]  # of three layers, after the ReLU

    def convolve(self, i: int, x: Tensor, padding: Any = 0) -> Tensor:
        stride = self.stride if i in (0, 3) else 1
        return F.conv2d(x, self.weights[i], None, stride, padding)

    def finish(self, i: int, y: Tensor) -> Tensor:
        return y * self.scales[i] + self.biases[i]

    def layer(self, i: int, x: Tensor, padding: Any = 0) -> Tensor:
        return self.finish(i, self.convolve(i, x, padding)).relu()

    def last(self, out2: Tensor) -> Tensor:
        y = self.finish(2, self.convolve(2, out2))
        return (y + (self.x if len(self.weights) == 3 else self.identity())).relu()

    def identity(self) -> Tensor:
        return self.finish(3, self.convolve(3, self.x))

    def sizes(self) -> list[torch.Size]:
        n, _, h, w = self.x.shape
        h, w = (h - 1) // self.stride + 1, (w - 1) // self.stride + 1
        return [torch.Size((n, self.weights[i].shape[0], h, w)) for i in range(3)]

    def before_last_relu(self) -> Tensor:
        return self.grad_o * (self.outs[2] > 0)

    def grad_out2(self) -> Tensor:
        dy = self.before_last_relu() * self.scales[2]
        dx = convolution.conv2d_input(self.outs[1].shape, self.weights[2], dy)
        return self.before(1, dx, self.outs[1])

    def of_conv2(self, grad_out2: Tensor) -> Tensor:
        """The gradient of out1."""
        n, _, h, w = grad_out2.shape
        weight = self.weights[1]
        return convolution.conv2d_input((n, weight.shape[1], h, w), weight, grad_out2, 1, 1)

    def before(self, i: int, dx: Tensor, out: Tensor) -> Tensor:
        """The gradient of a convolution's result, from that after its scale, bias and ReLU."""
        return dx * (out > 0) * self.scales[i]

    def wgrad(self, i: int, x: Tensor, dy: Tensor, padding: Any = 0) -> Tensor:
        stride = self.stride if i in (0, 3) else 1
        return convolution.conv2d_weight(x, self.weights[i].shape, dy, stride, padding)

    def rest(self, grad_out1: Tensor) -> list[Tensor]:
        """Gradients of x, and of the identity's weight if there is one."""
        dy, shape = self.before_last_relu(), self.x.shape
        dx = convolution.conv2d_input(shape, self.weights[0], grad_out1, self.stride)
        if len(self.weights) == 3:
            return [dx + dy]
        dy = dy * self.scales[3]
        of_identity = convolution.conv2d_input(shape, self.weights[3], dy, self.stride)
        return [dx + of_identity, self.wgrad(3, self.x, dy)]


def layers_of(
    name: str, nhwc: bool, stride: int, inputs: Sequence[Tensor], has_grad: bool
) -> Layers:
    """The tensors of a list, by name, as images.

    Raises:
        ValueError: there are too few or too many.
    """
    kept, given = (list(inputs[-4:]), list(inputs[:-4])) if has_grad else ([], list(inputs))
    if len(given) not in (10, 13):
        names = FORWARD + ", and with an identity's convolution w4, scale4, bias4"
        names += f", then {BACKWARD}" if has_grad else ""
        raise ValueError(f"{name}: inputs must be {names}; got {len(inputs)} tensors.")
    x, w1, w2, w3, *vectors = given
    weights, scales, biases = [w1, w2, w3], vectors[:3], vectors[3:6]
    if len(given) == 13:
        weights.append(vectors[6])
        scales.append(vectors[7])
        biases.append(vectors[8])
    shaped = [[v.reshape(-1, 1, 1) for v in of] for of in (scales, biases)]
    images = [image(nhwc, t) for t in (x, *weights, *kept)]
    count = len(weights)
    grad_o = images[1 + count] if kept else images[0]
    return Layers(stride, images[0], images[1 : 1 + count], *shaped, grad_o, images[2 + count :])


def run(like: Tensor, function: Callable[..., Any], *tensors: Any) -> Any:
    """Call a function of tensors without gradients and autocast.

    In float32 where a 16-bit dtype would be slow; results have the dtype of ``like``.
    """
    if is_slow(like):
        tensors = tuple(_cast(t, torch.float32) for t in tensors)
    with torch.no_grad():
        return _cast(plainly(like, function, *tensors), like.dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return [_cast(v, dtype) for v in value] if isinstance(value, (list, tuple)) else value
