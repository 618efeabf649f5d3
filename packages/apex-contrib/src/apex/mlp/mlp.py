"""Dense layers, each with the same activation: products from torch, gradients in one pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from apex.contrib._shared.native.composed import Composed, plainly
from apex.contrib._shared.native.half_matmul import needs_float32
from apex.contrib._shared.native.named_functions import NamedFunction
from apex.contrib._shared.native.operands import FLOATS, autocast
from apex.contrib._shared.native.plain import direct, plainness
from apex.contrib.dense_epilogue import RELU, SIGMOID, decompositions, dense_activation_backward
from apex.contrib.dense_epilogue.products import (
    check_input,
    check_layer,
    fits,
    linear_gradients,
)

__all__ = ["MLP", "MlpFunction", "decompositions", "mlp_function"]

_ACTIVATIONS = {"none": 0, "relu": RELU, "sigmoid": SIGMOID}
_NAME = "mlp_function"


def _layers(has_bias: bool, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    count = len(parameters) // 2 if has_bias else len(parameters)
    biases = parameters[count:] if has_bias else [None] * count
    return list(zip(parameters[:count], biases, strict=True))


def _reference(option: tuple[bool, int], x: Tensor, *parameters: Tensor) -> Tensor:
    has_bias, activation = option
    for weight, bias in _layers(has_bias, parameters):
        x = F.linear(x, weight, bias)
        if activation:
            x = torch.relu(x) if activation == RELU else torch.sigmoid(x)
    return x


def _forward(
    option: tuple[bool, int], x: Tensor, *parameters: Tensor, plain: bool = False
) -> tuple[Tensor, ...]:
    """The output, and the outputs of all layers; without activation not the last one again."""
    has_bias, activation = option
    # Compiled by torch 2.11, an output that was written in place would get no gradient.
    in_place = plain or not is_dynamo_compiling()
    y, outputs = x, []
    for weight, bias in _layers(has_bias, parameters):
        y = F.linear(y, weight, bias)
        if activation == RELU:
            y = y.relu_() if in_place else y.relu()
        elif activation:
            y = y.sigmoid_() if in_place else y.sigmoid()
        outputs.append(y)
    return y, *(outputs if activation else outputs[:-1])


def _backward(
    option: tuple[bool, int],
    needs: Sequence[bool],
    dy: Tensor,
    saved: Sequence[Tensor],
    plain: bool = False,
) -> list[Tensor | None]:
    has_bias, activation = option
    count = (len(needs) - 1) // (2 if has_bias else 1)
    weights, outputs = saved[1 : 1 + count], saved[len(needs) :]
    inputs = [saved[0], *outputs[: count - 1]]
    activation_backward = _run_activation_backward if plain else dense_activation_backward
    gradients: list[Tensor | None] = [None] * len(needs)
    for i in reversed(range(count)):
        wants_bias = has_bias and needs[1 + count + i]
        if activation:
            dy, dbias = activation_backward(dy, outputs[i], activation, wants_bias)
        asked = True in needs[: 1 + i], needs[1 + i], wants_bias and not activation
        if has_bias:
            asked = asked[0] or True in needs[1 + count : 1 + count + i], *asked[1:]
        given = inputs[i], weights[i]
        dx, gradients[1 + i], sums = linear_gradients(None, asked, dy, given, plain)
        if wants_bias:
            gradients[1 + count + i] = dbias if activation else sums
        if dx is None:
            return gradients
        dy = dx
    gradients[0] = dy
    return gradients


_run_activation_backward = direct(dense_activation_backward)
_mlp = Composed(_NAME, _forward, _backward, _reference, is_asked=True)


def _call(name: str, bias: int, activation: int, *args: Tensor) -> Tensor:
    """:func:`mlp_function`, whose errors begin with the caller's ``name``."""
    if (answer := plainness(*args)) and _fit(bias, activation, args):
        return _mlp.plain[answer]((bool(bias), int(activation)), *args)
    return _checked(name, bias, activation, *(autocast(*args) if args else ()))


def _checked(name: str, bias: int, activation: int, *args: Tensor) -> Tensor:
    check_operands(name, bias, activation, args)
    input, option = args[0], (bool(bias), int(activation))
    if needs_float32(*args):
        return _mlp(option, *[tensor.float() for tensor in args]).to(input.dtype)
    return _mlp(option, *args)


def run(name: str, bias: int, activation: int, args: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the outputs of all layers; without gradients, and without autocast."""
    check_operands(name, bias, activation, args)
    option, dtype = (bool(bias), int(activation)), args[0].dtype
    wide = [t.float() for t in args] if needs_float32(*args) else args
    with torch.no_grad():
        results = plainly(args[0], _forward, option, *wide)
    results = results if activation else (*results, results[0])
    return [result.to(dtype) for result in results]


def gradients(
    bias: int, activation: int, dy: Tensor, args: Sequence[Tensor], outputs: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of all arguments, given the outputs of all layers; without autocast."""
    option, dtype, given = (bool(bias), int(activation)), dy.dtype, (dy, *args, *outputs)
    if needs_float32(*args):
        given = tuple(t.float() for t in given)
    with torch.no_grad():
        results = plainly(dy, _backward, option, (True,) * len(args), given[0], given[1:])
    return [result.to(dtype) for result in results]


def mlp_function(bias: int, activation: int, *args: Tensor) -> Tensor:
    r"""Apply dense layers, each followed by the activation, the last one too.

    .. math:: h_0 = x, \qquad h_{i+1} = f(h_i W_i^T + b_i), \qquad y = h_n

    Args:
        bias: 1 if the layers have biases, else 0.
        activation: 0 for none, 1 for ReLU, 2 for sigmoid.
        *args: the input ``[..., in]``, then all weights, ``[out, in]`` each, then all biases,
            ``[out]`` each, if ``bias`` is 1. One dtype and device; float64, float32, float16 or
            bfloat16; any layout.

    Returns:
        ``[..., out]`` of the last layer. Under autocast everything is cast to its dtype first, but
        for float64. Inside, autocast is off, in the backward too. It may be differentiated any
        number of times.

    Raises:
        TypeError: a dtype is not one of those above, or the dtypes differ.
        ValueError: ``activation``, a shape, a device or the number of tensors does not fit.

    Source:
        ``torch.nn.Linear`` and activations; Apex's ``apex.mlp`` has the same names.

    Example:
        >>> x, weight, bias = torch.randn(4, 8), torch.randn(3, 8), torch.randn(3)
        >>> mlp_function(1, 1, x, weight, bias).shape
        torch.Size([4, 3])
    """
    return _call(_NAME, bias, activation, *args)


def _fit(bias: int, activation: int, args: Sequence[Any]) -> bool:
    """Whether plain tensors, or None, are taken as they are."""
    count = len(args) - 1
    if activation not in _ACTIVATIONS.values() or count < 1 or (bias and count % 2):
        return False
    for tensor in args:
        if tensor is None:
            return False
    x = args[0]
    if x.dtype not in FLOATS or x.layout is not torch.strided or not x.dim():
        return False
    if not fits(x, x.shape[-1], *_layers(bool(bias), args[1:])):
        return False
    return x.dtype is torch.float32 or not needs_float32(*args)


def check_operands(name: str, bias: int, activation: int, args: Sequence[Tensor]) -> None:
    """Raise TypeError or ValueError for what :func:`mlp_function` does not take."""
    if activation not in (0, RELU, SIGMOID):
        raise ValueError(
            f"{name}: activation must be 0 (none), 1 (ReLU) or 2 (sigmoid), got {activation!r}."
        )
    count = len(args) - 1
    if count < 1 or (bias and count % 2):
        raise ValueError(
            f"{name}: after bias and activation, the arguments must be the input, at least one "
            f"weight{', and as many biases' if bias else ''}; got {len(args)} arguments."
        )
    input = args[0]
    check_input(name, input)
    columns = input.shape[-1]
    for i, (weight, of_layer) in enumerate(_layers(bool(bias), args[1:])):
        if bias and of_layer is None:
            raise TypeError(f"{name}: biases[{i}] is None; pass bias=0 for layers without biases.")
        names = f"weights[{i}]", f"biases[{i}]"
        columns = check_layer(name, input, columns, weight, of_layer, names)


class MlpFunction(NamedFunction):
    """Apex's class of :func:`mlp_function`; its arguments are not cast under autocast."""

    @staticmethod
    def apply(bias: int, activation: int, *args: Tensor) -> Tensor:
        return _checked("MlpFunction", bias, activation, *args)


class MLP(nn.Module):
    """Dense layers, each followed by the activation, the last one too; see :func:`mlp_function`.

    Args:
        mlp_sizes: features of the input, then of each layer's output; at least two.
        bias: whether the layers have biases.
        activation: "none", "relu" or "sigmoid".

    Attributes:
        weight_0, weight_1, ...: ``[out, in]``, from N(0, 2 / (in + out)).
        bias_0, bias_1, ...: ``[out]``, from N(0, 1 / out).
        weights, biases: lists of these, made anew whenever they are read.

    Raises:
        TypeError: ``activation`` is another word.
        ValueError: there are fewer than two sizes.

    Example:
        >>> mlp = MLP([8, 16, 4])
        >>> mlp(torch.randn(32, 8)).shape
        torch.Size([32, 4])
    """

    def __init__(
        self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu"
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise TypeError(
                f"MLP: activation must be 'none', 'relu' or 'sigmoid', got {activation!r}."
            )
        if len(mlp_sizes) < 2:
            raise ValueError(
                "MLP: mlp_sizes must hold the input's features and those of at least one layer, "
                f"got {list(mlp_sizes)}."
            )
        self.mlp_sizes, self.num_layers = list(mlp_sizes), len(mlp_sizes) - 1
        self.bias, self.activation = int(bool(bias)), _ACTIVATIONS[activation]
        for i, (columns, rows) in enumerate(itertools.pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(rows, columns)))
            if bias:
                self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(rows)))
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        return [getattr(self, f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        return [getattr(self, f"bias_{i}") for i in range(self.num_layers if self.bias else 0)]

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / max(1, sum(weight.shape))))
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / max(1, bias.shape[0])))

    def forward(self, input: Tensor) -> Tensor:
        """``input``: ``[..., mlp_sizes[0]]``; returns ``[..., mlp_sizes[-1]]``."""
        parameters, weights, biases = self._parameters, [], []
        is_own = type(self).weights is MLP.weights and type(self).biases is MLP.biases
        try:  # attributes of modules take a while to look up
            for i in range(self.num_layers if is_own else 0):
                weights.append(parameters[f"weight_{i}"])
                if self.bias:
                    biases.append(parameters[f"bias_{i}"])
        except KeyError:
            is_own = False  # parametrized
        if not is_own:
            weights, biases = self.weights, self.biases
        return _call("MLP", self.bias, self.activation, input, *weights, *biases)

    def extra_repr(self) -> str:
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"
