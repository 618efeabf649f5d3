"""Checks of what users pass to normalization; every failure names the argument."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._shared.native.operands import FLOATS, check_floating, statistics_dtype
from .._shared.native.transforms import kernels_serve

Shape = int | Sequence[int]


def as_shape(name: str, normalized_shape: Shape) -> tuple[int, ...]:
    """Return ``normalized_shape`` as a tuple; an int (also numpy's or symbolic) is one dimension.

    ``name`` is the caller's, for messages.

    Raises:
        TypeError: it is neither an int nor a sequence.
        ValueError: it is empty or has a size below 1.
    """
    if not isinstance(normalized_shape, tuple):  # which modules keep
        normalized_shape = _sizes(name, normalized_shape)
    shape = tuple(normalized_shape)
    if not shape or min(shape) < 1:
        raise ValueError(
            f"{name}: normalized_shape must name at least one dimension, each of size 1 or more; "
            f"got {list(shape)}."
        )
    return shape


def _sizes(name: str, normalized_shape: Any) -> tuple[int, ...]:
    if isinstance(normalized_shape, (int, torch.SymInt)):
        return (normalized_shape,)
    try:
        return tuple(normalized_shape)
    except TypeError:
        pass
    try:
        return (operator.index(normalized_shape),)
    except TypeError:
        raise TypeError(
            f"{name}: normalized_shape must be an int or a sequence of ints, got "
            f"{type(normalized_shape).__name__}."
        ) from None


def mixed_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a mixed-dtype module that mean something; complain about others."""
    if "elementwise_affine" in options:
        warnings.warn(f"{name}: elementwise_affine is always True here.", stacklevel=3)
        if not options["elementwise_affine"]:
            raise RuntimeError(
                f"{name} has a weight by definition: its result takes the weight's dtype. For "
                f"elementwise_affine=False use {name.removeprefix('Mixed')}."
            )
    meant = ("bias", "device", "dtype", "sequence_parallel_enabled", "zero_centered_gamma")
    known = {key: options[key] for key in meant if key in options}
    ignored = sorted(options.keys() - known.keys() - {"elementwise_affine"})
    if ignored:
        warnings.warn(f"{name}: ignored the keywords {', '.join(ignored)}.", stacklevel=3)
    return known


def check_eps(name: str, eps: float) -> None:
    """Raise ValueError unless ``eps`` is finite and not negative, TypeError for no number."""
    try:
        is_good = 0 <= eps < math.inf
    except TypeError:
        raise TypeError(
            f"{name}: eps must be a number, got {type(eps).__name__}. (None stands for machine "
            "epsilon in RMS norms alone.)"
        ) from None
    if not is_good:
        raise ValueError(f"{name}: eps must be finite and not negative, got {eps}.")


def check_operands(
    name: str,
    x: Tensor,
    weights: Sequence[Tensor | None],
    shape: tuple[int, ...],
    eps: float,
    mixed: bool = True,
) -> None:
    """Check the operands of one normalization; without ``mixed``, they must have one dtype.

    ``weights`` are weight and bias, or the weight of an RMS norm.

    Raises:
        TypeError: ``x`` is not a floating-point tensor, or dtypes do not go together.
        ValueError: shapes or devices do not go together, or eps is out of range.
    """
    check_floating(name, "input", x)
    if x.is_nested:
        raise TypeError(
            f"{name}: input must not be a nested tensor. Normalize its values(), and make a nested "
            "tensor of the result with torch.nested.nested_tensor_from_jagged()."
        )
    check_eps(name, eps)
    if x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{name}: normalized_shape is {list(shape)}, but the last dimensions of input are "
            f"{list(x.shape)[-len(shape) :]} (input: {list(x.shape)})."
        )
    weight, bias = (*weights, None)[:2]
    if weight is not None and not _is_alike(weight, x, shape):
        _check_parameter(name, "weight", weight, x, shape)
        if not mixed and weight.dtype != x.dtype:
            raise TypeError(
                f"{name}: weight is {_dtype(weight)}, but input is {_dtype(x)}. Cast one of them, "
                "or use the mixed-dtype variant, whose result has the weight's dtype."
            )
    if bias is not None:
        if not _is_alike(bias, x, shape):
            _check_parameter(name, "bias", bias, x, shape)
        if weight is None:
            raise ValueError(f"{name}: a bias was given without a weight; pass a weight of ones.")
        if bias.dtype != weight.dtype:
            raise TypeError(
                f"{name}: bias is {_dtype(bias)}, but weight is {_dtype(weight)}; cast one of them."
            )


def check_recoverable(name: str, weight: Tensor | None, zero_centered_gamma: bool = False) -> None:
    """Raise ValueError where an input cannot be recovered from the output: it is multiplied by 0.

    Call it where a gradient is wanted. It checks weights on the CPU, outside of compilation; on a
    GPU the host would have to wait for them.
    """
    if weight is None or torch.compiler.is_compiling():
        return
    if type(weight) not in (Tensor, nn.Parameter) or weight.device.type != "cpu":
        return
    if (weight != -1 if zero_centered_gamma else weight).all():
        return
    if not kernels_serve():  # plain PyTorch keeps the input
        return
    erasing = -1 if zero_centered_gamma else 0
    where = (weight == erasing).nonzero()
    raise ValueError(
        f"{name}: weight{where[0].tolist()} is {erasing} ({len(where)} of {weight.numel()} are), "
        "which leaves nothing of its input in the output: memory_efficient=True cannot recover it "
        f"for the backward. Use memory_efficient=False, or start from weights other than {erasing}."
    )


def rms_eps(x: Any, eps: float | None) -> float:
    """What ``eps=None`` means, as in torch: machine epsilon of the dtype of the computation."""
    if eps is not None:
        return eps
    return torch.finfo(statistics_dtype(getattr(x, "dtype", None))).eps


def _is_alike(parameter: Tensor, x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether there is nothing to complain about, as nearly always: saves most of the checks."""
    return (
        isinstance(parameter, Tensor)
        and parameter.dtype == x.dtype
        and parameter.shape == shape
        and parameter.device == x.device
    )


def _check_parameter(name: str, argument: str, tensor: Tensor, x: Tensor, shape) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS:
        got = _dtype(tensor) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: {argument} must be a floating-point tensor, got {got}.")
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name}: {argument} has shape {list(tensor.shape)}, but normalized_shape is "
            f"{list(shape)} (input: {list(x.shape)})."
        )
    if tensor.device != x.device:
        raise ValueError(
            f"{name}: {argument} is on {tensor.device}, but input is on {x.device}; "
            "move one of them."
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
