"""Layer normalization over the last dimension, under the names of Apex's FastLayerNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._shared.native.named_functions import NamedFunction
from .._shared.native.operands import as_rows, autocast_norm, check_floating, exact
from .._shared.native.plain import explain, plainness
from .fast_layer_norm import formula

__all__ = ["FastLayerNorm", "FastLayerNormFN", "_fast_layer_norm", "decompositions"]

_NAME = "FastLayerNorm"


def decompositions() -> dict[Any, Any]:
    """The operators in ATen's, for ``ExportedProgram.run_decompositions``."""
    return {**formula.layer_norm.decompositions(), **formula.from_output.decompositions()}


class FastLayerNorm(nn.Module):
    r"""Layer normalization over the last dimension, as Apex's class of this name.

    .. math:: y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} \cdot w + b

    Args:
        hidden_size: the length of the last dimension, any from 1. (Apex's takes 26 of them.)
        eps: added to the biased variance; kept as ``epsilon``.
        memory_efficient: keep the output for the backward instead of the input, which is recovered
            as ``(y - b) / w``, with a divisor of at least ``eps``. Its gradients cannot be
            differentiated again.
        zero_centered_gamma: multiply by ``1 + w``, and start from a ``w`` of zeros. The sum is
            formed in what rows are computed in, so small changes of a 16-bit weight count.

    Input is float64, float32, float16 or bfloat16, of any layout; computed in float32 at least. The
    output has the dtype of the weight. Autocast casts all to its dtype, but float64;
    amp's O1 and O4 cast 16 bits to float32.

    Raises:
        ValueError: ``hidden_size`` is not positive, or ``eps`` is negative.

    Source:
        Ba, Kiros & Hinton 2016, "Layer normalization", https://arxiv.org/abs/1607.06450

    Example:
        >>> FastLayerNorm(768)(torch.randn(2, 5, 768)).shape
        torch.Size([2, 5, 768])
    """

    zero_centered_gamma = False  # of modules in pickles of Apex's

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        memory_efficient: bool = False,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__()
        if hidden_size < 1 or eps < 0:
            raise ValueError(
                f"{_NAME}: hidden_size must be positive and eps not negative, got {hidden_size} "
                f"and {eps}."
            )
        self.epsilon, self.memory_efficient = eps, memory_efficient
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones, or to zeros if it is zero-centred, and the bias to zeros."""
        (nn.init.zeros_ if self.zero_centered_gamma else nn.init.ones_)(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` ``[..., hidden_size]``."""
        parameters = self._parameters
        try:  # attributes of modules take a while to look up
            vectors = parameters["weight"], parameters["bias"]
        except KeyError:  # parametrized
            vectors = self.weight, self.bias
        options = self.epsilon, self.memory_efficient, self.zero_centered_gamma
        return _normalize(True, x, *vectors, *options)

    def extra_repr(self) -> str:
        return "zero_centered_gamma=True" if self.zero_centered_gamma else ""


class FastLayerNormFN(NamedFunction):
    """Apex's class of :func:`_fast_layer_norm`; autocast changes nothing."""

    @staticmethod
    def apply(
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        epsilon: float,
        memory_efficient: bool = False,
        *,
        zero_centered_gamma: bool = False,
    ) -> Tensor:
        """Normalize ``x`` ``[..., H]`` with ``gamma`` and ``beta`` ``[H]``."""
        options = epsilon, memory_efficient, zero_centered_gamma
        return _normalize(False, x, gamma, beta, *options)


def _fast_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    memory_efficient: bool = False,
    *,
    zero_centered_gamma: bool = False,
) -> Tensor:
    """Normalize the last dimension; see :class:`FastLayerNorm`.

    Raises:
        TypeError: a dtype is not one of those of the class, or weight's and bias's differ.
        ValueError: shapes or devices do not fit, or ``epsilon`` is negative.
    """
    options = epsilon, memory_efficient, zero_centered_gamma
    return _normalize(True, x, weight, bias, *options)


def _normalize(
    casts: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    memory_efficient: bool,
    zero_centered_gamma: bool,
) -> Tensor:
    """:func:`_fast_layer_norm`; autocast changes nothing unless ``casts``."""
    call = formula.from_output if memory_efficient else formula.layer_norm
    try:
        if (
            (answer := plainness(x, weight, bias))
            and x.dim() > 1
            and x.shape[-1:] == weight.shape == bias.shape
            and weight.numel()
            and not x.is_meta
            and x.dtype is weight.dtype
            and type(epsilon) is float
            and epsilon >= 0.0
        ):
            operands = x.contiguous(), weight.contiguous(), bias.contiguous()
            return call.plain[answer](*operands, epsilon, zero_centered_gamma)
    except (AttributeError, RuntimeError):  # of None, and of the operator's checks
        explain(_check, x, weight, bias, epsilon)
    if casts:
        x, weight, bias = autocast_norm(x, weight, bias)
    _check(x, weight, bias, epsilon)
    dtype, rows = torch.promote_types(x.dtype, weight.dtype), as_rows(x, 1)
    options = float(epsilon), zero_centered_gamma
    y = call(exact(rows, dtype), exact(weight, dtype), exact(bias, dtype), *options)
    y = y if rows is x else y.reshape(x.shape)
    return y if y.dtype == weight.dtype else y.to(weight.dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    for argument, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        check_floating(_NAME, argument, tensor)
    if weight.dtype != bias.dtype:
        raise TypeError(f"{_NAME}: bias is {bias.dtype}, but weight is {weight.dtype}; cast one.")
    columns = x.shape[-1:] if x.dim() else (0,)
    if not weight.shape == bias.shape == columns or 0 in weight.shape:
        raise ValueError(
            f"{_NAME}: weight and bias must have the shape [{', '.join(map(str, columns))}] of the "
            f"last dimension of x {list(x.shape)}, which must not be 0, got {list(weight.shape)} "
            f"and {list(bias.shape)}."
        )
    if eps < 0:
        raise ValueError(f"{_NAME}: epsilon must not be negative, got {eps}.")
    if not x.device == weight.device == bias.device:
        raise ValueError(
            f"{_NAME}: x is on {x.device}, but weight on {weight.device} and bias on "
            f"{bias.device}; move them to one device."
        )
