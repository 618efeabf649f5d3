"""Dense layers: products from torch, GELU and its gradient from the epilogue's kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apex.contrib._shared.native.composed import Composed
from apex.contrib._shared.native.half_matmul import needs_float32
from apex.contrib._shared.native.named_functions import NamedFunction
from apex.contrib._shared.native.operands import FLOATS, autocast
from apex.contrib._shared.native.plain import explain, plainness
from apex.contrib.dense_blaslt import dense_gelu_gradient, dense_with_gelu
from apex.contrib.dense_epilogue import (
    GELU,
    decompositions,
    dense_activation_backward,
    dense_gelu,
)
from apex.contrib.dense_epilogue.layer import dense
from apex.contrib.dense_epilogue.products import (
    as_matrix,
    check_input,
    check_layer,
    fits,
    linear_gradients,
)

__all__ = [
    "DenseNoBiasFunc",
    "FusedDense",
    "FusedDenseFunc",
    "FusedDenseGeluDense",
    "FusedDenseGeluDenseFunc",
    "decompositions",
    "dense_no_bias_function",
    "fused_dense_function",
    "fused_dense_gelu_dense_function",
]


def _plain_gelu_dense(
    _: None,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
) -> Tensor:
    hidden = F.gelu(F.linear(x, weight1, bias1), approximate="tanh")
    return F.linear(hidden, weight2, bias2)


def _gelu_dense_forward(
    _: None,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    plain: bool = False,
) -> tuple[Tensor, ...]:
    """The output, and GELU's input and output."""
    made = dense_with_gelu(x, weight1, bias1, plain)
    if made is None:
        gelu_in = F.linear(x, weight1, bias1)
        hidden = dense_gelu(gelu_in)
    else:
        hidden, gelu_in = made
    return F.linear(hidden, weight2, bias2), gelu_in, hidden


def _gelu_dense_backward(
    _: None, needs: Sequence[bool], dy: Tensor, saved: Sequence[Tensor], plain: bool = False
) -> list[Tensor | None]:
    x, weight1, _, weight2, _, gelu_in, hidden = saved
    dy = dy if dy.dim() == 2 else as_matrix(dy)
    _, *of_second = linear_gradients(None, (False, *needs[3:]), dy, (hidden, weight2), plain)
    if True not in needs[:3]:
        return [None, None, None, *of_second]
    made = dense_gelu_gradient(dy, weight2, gelu_in, needs[2], plain)
    if made is None:
        dhidden = dy.mm(weight2)
        made = dense_activation_backward(dhidden, as_matrix(gelu_in), GELU, needs[2])
    dgelu, dbias1 = made
    asked = *needs[:2], False
    dx, dweight1, _ = linear_gradients(None, asked, dgelu, (x, weight1), plain)
    return [dx, dweight1, dbias1 if needs[2] else None, *of_second]


_gelu_dense = Composed(
    "fused_dense_gelu_dense_function",
    _gelu_dense_forward,
    _gelu_dense_backward,
    _plain_gelu_dense,
    is_asked=True,
)


def _check_dense(name: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_input(name, input)
    check_layer(name, input, input.shape[-1], weight, bias)


def _checked_dense(name: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check_dense(name, input, weight, bias)
    if needs_float32(input, weight):
        wide = [t if t is None else t.float() for t in (input, weight, bias)]
        return dense(None, *wide).to(input.dtype)
    return dense(None, input, weight, bias)


def _dense(name: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`fused_dense_function`, whose errors begin with the caller's ``name``."""
    try:
        if (
            (answer := plainness(input, weight, bias))
            and weight.dim() == 2
            and (bias is None or (bias.shape == weight.shape[:1] and not bias.is_meta))
            and not weight.is_meta
            and not input.is_meta
            and (
                input.dtype is torch.float32
                or (input.dtype in FLOATS and input.dim() and not needs_float32(input, weight))
            )
        ):
            return dense.plain[answer](None, input, weight, bias)
    except (AttributeError, RuntimeError):  # of None, and of torch's checks
        explain(_check_dense, name, input, weight, bias)
    return _checked_dense(name, *autocast(input, weight, bias))


def _checked_gelu_dense(
    name: str,
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
) -> Tensor:
    check_input(name, input)
    columns = check_layer(name, input, input.shape[-1], weight1, bias1, ("weight1", "bias1"))
    check_layer(name, input, columns, weight2, bias2, ("weight2", "bias2"))
    tensors = (input, weight1, bias1, weight2, bias2)
    if needs_float32(input, weight1, weight2):
        wide = [t if t is None else t.float() for t in tensors]
        return _gelu_dense(None, *wide).to(input.dtype)
    return _gelu_dense(None, *tensors)


def _dense_gelu_dense(
    name: str,
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
) -> Tensor:
    """:func:`fused_dense_gelu_dense_function`, whose errors begin with the caller's ``name``."""
    tensors = (input, weight1, bias1, weight2, bias2)
    if (
        (answer := plainness(*tensors))
        and input is not None
        and input.dtype in FLOATS
        and input.layout is torch.strided
        and input.dim()
        and fits(input, input.shape[-1], (weight1, bias1), (weight2, bias2))
        and not needs_float32(input, weight1, weight2)
    ):
        return _gelu_dense.plain[answer](None, *tensors)
    return _checked_gelu_dense(name, *autocast(*tensors))


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    r"""Apply a dense layer: ``F.linear`` whose backward no autocast changes.

    .. math:: y = x W^T + b

    Args:
        input: ``[..., in]``; float64, float32, float16 or bfloat16; any layout.
        weight: ``[out, in]``, in the input's dtype and on its device.
        bias: ``[out]``, likewise, or None.

    Returns:
        ``[..., out]``. Under autocast everything is cast to its dtype first, but for float64.
        Inside, autocast is off, in the backward too. It may be differentiated any number of times.

    Raises:
        TypeError: a dtype is not one of those above, or the dtypes differ.
        ValueError: shapes or devices do not fit.

    Source:
        ``torch.nn.functional.linear``; Apex's ``apex.fused_dense`` has the same names.

    Example:
        >>> fused_dense_function(torch.randn(4, 8), torch.randn(3, 8), torch.randn(3)).shape
        torch.Size([4, 3])
    """
    return _dense("fused_dense_function", input, weight, bias)


def dense_no_bias_function(input: Tensor, weight: Tensor) -> Tensor:
    """Apply a dense layer without bias; the rest is as of :func:`fused_dense_function`."""
    return _dense("dense_no_bias_function", input, weight, None)


def fused_dense_gelu_dense_function(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> Tensor:
    r"""Apply two dense layers with GELU between them.

    .. math:: y = \mathrm{gelu}(x W_1^T + b_1) \, W_2^T + b_2

    with GELU in its tanh form, as (cu|hip)BLASLt compute it: within 4.7e-4 of the exact one.

    Args:
        input: ``[..., in]``; float64, float32, float16 or bfloat16; any layout.
        weight1, bias1: ``[hidden, in]`` and ``[hidden]``, in the input's dtype and on its device.
        weight2, bias2: ``[out, hidden]`` and ``[out]``. Either bias may be None.

    Returns:
        ``[..., out]``. Under autocast everything is cast to its dtype first, but for float64.
        Inside, autocast is off, in the backward too. It may be differentiated any number of times.

    Raises:
        TypeError: a dtype is not one of those above, or the dtypes differ.
        ValueError: shapes or devices do not fit.

    Source:
        Hendrycks & Gimpel, *Gaussian error linear units*, 2016, section 2.

    Example:
        >>> weights = torch.randn(16, 8), torch.randn(3, 16)
        >>> x, biases = torch.randn(4, 8), (torch.randn(16), torch.randn(3))
        >>> fused_dense_gelu_dense_function(x, weights[0], biases[0], weights[1], biases[1]).shape
        torch.Size([4, 3])
    """
    tensors = (input, weight1, bias1, weight2, bias2)
    return _dense_gelu_dense("fused_dense_gelu_dense_function", *tensors)


# NVIDIA's names.
_fused_dense = fused_dense_function
_dense_no_bias = dense_no_bias_function
_fused_dense_gelu_dense = fused_dense_gelu_dense_function


class FusedDenseFunc(NamedFunction):
    """Apex's class of :func:`fused_dense_function`; arguments are not cast under autocast."""

    @staticmethod
    def apply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _checked_dense("FusedDenseFunc", input, weight, bias)


class DenseNoBiasFunc(NamedFunction):
    """Apex's class of :func:`dense_no_bias_function`; arguments are not cast under autocast."""

    @staticmethod
    def apply(input: Tensor, weight: Tensor) -> Tensor:
        return _checked_dense("DenseNoBiasFunc", input, weight, None)


class FusedDenseGeluDenseFunc(NamedFunction):
    """Apex's class of :func:`fused_dense_gelu_dense_function`; autocast casts no arguments."""

    @staticmethod
    def apply(
        input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
    ) -> Tensor:
        tensors = (input, weight1, bias1, weight2, bias2)
        return _checked_gelu_dense("FusedDenseGeluDenseFunc", *tensors)


def _reset(weight: Tensor, bias: Tensor | None) -> None:
    """Draw parameters as ``torch.nn.Linear`` does."""
    if weight.numel():
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(max(1, weight.shape[1]))
        nn.init.uniform_(bias, -bound, bound)


class FusedDense(nn.Module):
    """A dense layer, ``y = x W^T + b``; see :func:`fused_dense_function`.

    Args:
        in_features: of the input, ``[..., in_features]``.
        out_features: of the output.
        bias: whether there is a bias.

    Attributes:
        weight: ``[out_features, in_features]``, drawn as in ``torch.nn.Linear``; so is
        bias: ``[out_features]``, or None.

    Example:
        >>> FusedDense(8, 4)(torch.randn(32, 8)).shape
        torch.Size([32, 4])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        _reset(self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        parameters = self._parameters  # attributes of modules take a while to look up
        if "weight" in parameters and "bias" in parameters:
            return _dense("FusedDense", input, parameters["weight"], parameters["bias"])
        return _dense("FusedDense", input, self.weight, self.bias)  # parametrized

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class FusedDenseGeluDense(nn.Module):
    """Two dense layers with GELU between; see :func:`fused_dense_gelu_dense_function`.

    Args:
        in_features: of the input, ``[..., in_features]``.
        intermediate_features: between the layers.
        out_features: of the output, ``[..., out_features]``.
        bias: whether the layers have biases. (In Apex they must.)

    Attributes:
        weight1, weight2: ``[intermediate_features, in_features]`` and
            ``[out_features, intermediate_features]``, drawn as in ``torch.nn.Linear``; so are
        bias1, bias2: ``[intermediate_features]`` and ``[out_features]``, or None.

    Example:
        >>> FusedDenseGeluDense(8, 32, 4)(torch.randn(16, 8)).shape
        torch.Size([16, 4])
    """

    def __init__(
        self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.intermediate_features = intermediate_features
        sizes = (in_features, intermediate_features, out_features)
        for i, (columns, rows) in enumerate(itertools.pairwise(sizes), start=1):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(rows, columns)))
            of_layer = nn.Parameter(torch.empty(rows)) if bias else None
            self.register_parameter(f"bias{i}", of_layer)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        _reset(self.weight1, self.bias1)
        _reset(self.weight2, self.bias2)

    def forward(self, input: Tensor) -> Tensor:
        parameters = self._parameters
        try:
            tensors = (
                parameters["weight1"],
                parameters["bias1"],
                parameters["weight2"],
                parameters["bias2"],
            )
        except KeyError:  # parametrized
            tensors = (self.weight1, self.bias1, self.weight2, self.bias2)
        return _dense_gelu_dense("FusedDenseGeluDense", input, *tensors)

    def extra_repr(self) -> str:
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        bias = self.bias1 is not None
        return f"{features}, intermediate_features={self.intermediate_features}, bias={bias}"
