"""Softmaxes behind their checks, for functions, classes and extension modules of many names."""

from __future__ import annotations

import torch
from torch import Tensor

from ...parallel._ops import library
from ...parallel._shared.native.operands import check_floating, exact
from ...parallel._shared.native.plain import explain, plainness
from . import scaled_softmax as _ops
from .scaled_softmax import causal_softmax, masked_softmax, scaled_softmax


def causal(name: str, inputs: Tensor, scale: float) -> Tensor:
    try:
        if (answer := plainness(inputs)) and not inputs.is_meta:
            return causal_softmax.plain[answer](inputs.contiguous(), float(scale))
    except (AttributeError, RuntimeError):  # of None, and of the operator's checks
        explain(_check_causal, name, inputs)
    _check_causal(name, inputs)
    return causal_softmax(exact(inputs), float(scale))


def _check_causal(name: str, inputs: Tensor) -> None:
    check_floating(name, "inputs", inputs)
    if inputs.dim() < 2 or inputs.shape[-1] != inputs.shape[-2]:
        raise ValueError(
            f"{name}: inputs must have shape [..., sequence, sequence], got {list(inputs.shape)}."
        )


def scaled(name: str, inputs: Tensor, scale: float) -> Tensor:
    check_floating(name, "inputs", inputs)
    if inputs.dim() == 0:
        raise ValueError(f"{name}: inputs must have shape [..., keys], got {list(inputs.shape)}.")
    return scaled_softmax(exact(inputs), float(scale))


def masked(name: str, inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if mask is None:
        return scaled(name, inputs, scale)
    try:
        if (
            (answer := plainness(inputs, mask))
            and not inputs.is_meta
            and inputs.dim() == mask.dim() == 4
        ):
            mask_of_each = mask.contiguous().expand(inputs.shape[0], -1, -1, -1)
            given = inputs.contiguous(), mask_of_each, float(scale)
            return masked_softmax.plain[answer](*given)
    except (AttributeError, RuntimeError):  # of None, and of the operator's checks
        explain(_check_masked, name, inputs, mask)
    _check_masked(name, inputs, mask)
    mask = exact(mask).expand(inputs.shape[0], -1, -1, -1)
    return masked_softmax(exact(inputs), mask, float(scale))


def _check_masked(name: str, inputs: Tensor, mask: Tensor) -> None:
    check_floating(name, "inputs", inputs)
    if inputs.dim() != 4:
        raise ValueError(
            f"{name}: inputs must have shape [batch, heads, queries, keys], "
            f"got {list(inputs.shape)}."
        )
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"{name}: mask must be bool or uint8, got {mask.dtype}.")
    batch, _, queries, keys = inputs.shape
    if mask.shape not in ((batch, 1, queries, keys), (1, 1, queries, keys)):
        raise ValueError(
            f"{name}: mask must have shape [{batch} or 1, 1, {queries}, {keys}] for inputs "
            f"{list(inputs.shape)}, got {list(mask.shape)}."
        )
    if mask.device != inputs.device:
        raise ValueError(
            f"{name}: mask must be on {inputs.device}, as inputs are; it is on {mask.device}."
        )


def backward(name: str, output_grads: Tensor, softmax_results: Tensor, scale: float) -> Tensor:
    """Gradient of the scores, from what the forward gave."""
    y = _like(name, output_grads, softmax_results)
    return _ops.scaled_softmax_backward(output_grads, y, float(scale))


def causal_backward(
    name: str, output_grads: Tensor, softmax_results: Tensor, scale: float
) -> Tensor:
    """The same of the causal softmax."""
    y = _like(name, output_grads, softmax_results)
    return _ops.causal_softmax_backward(output_grads, y, float(scale))


def _like(name: str, output_grads: Tensor, softmax_results: Tensor) -> Tensor:
    check_floating(name, "softmax_results", softmax_results)
    if output_grads.shape != softmax_results.shape or output_grads.dtype != softmax_results.dtype:
        raise ValueError(
            f"{name}: output_grads must be {softmax_results.dtype} of shape "
            f"{list(softmax_results.shape)}, as softmax_results; got {output_grads.dtype} of shape "
            f"{list(output_grads.shape)}."
        )
    return exact(softmax_results)


def batch_per_block(keys: int) -> int:
    """Rows per block in Apex's kernel: 128 threads, a warp or less for 1 or 2 rows."""
    width = 1 << max(keys - 1, 0).bit_length()
    warp = torch.cuda.get_device_properties().warp_size if torch.cuda.is_available() else 32
    return 128 // min(width, warp) * (2 if width <= 128 else 1)


def require(module: str) -> None:
    """Raise ImportError unless the kernels are there, or can be built."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    library.require_for_import(module, "scaled_softmax", device_type=device_type)
