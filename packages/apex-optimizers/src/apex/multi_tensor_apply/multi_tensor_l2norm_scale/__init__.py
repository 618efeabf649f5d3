"""multi_tensor_l2norm_scale: a scaled copy of lists of tensors and their norm, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from apex.optimizers._ops import library
from apex.optimizers._shared.native.writes import call_counted
from apex.optimizers.stepping.checks import describe

__all__ = ["multi_tensor_l2norm_scale", "multi_tensor_scale_squares"]


@library.define(
    "multi_tensor_scale_squares(Tensor[] inputs, Tensor(b!)[] outputs, float scale) -> Tensor"
)
def multi_tensor_scale_squares(inputs: list[Tensor], outputs: list[Tensor], scale: float) -> Tensor:
    """``outputs[i] = inputs[i] * scale``, and the sum of squares of each input.

    Args:
        inputs, outputs: as in :func:`apex.multi_tensor_apply.multi_tensor_scale`; at least one.

    Returns:
        ``sums`` [len(inputs)], float64: ``sums[i] = sum of inputs[i]**2``, added in chunks of
        65,536 elements in a fixed order.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match; nothing is written then.
    """
    return inputs[0].new_empty(len(inputs), dtype=torch.float64)


def multi_tensor_l2norm_scale(
    inputs: list[Tensor],
    outputs: list[Tensor],
    flag: Tensor,
    scale: float,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    """``outputs[i] = inputs[i] * scale``, and the Euclidean norm of the inputs before scaling.

    Args:
        inputs, outputs: as in :func:`apex.multi_tensor_apply.multi_tensor_scale`; at least one.
        flag: int32, one element, on the same device; set to 1 where an input is inf or NaN, or
            where squares of float64 inputs overflow (beyond 1e154).
        per_tensor: give each tensor's norm, too.

    Returns:
        ``norm`` [1] and ``norms`` [len(inputs)], or [0] without ``per_tensor``: float32, or float64
        for float64 inputs.

    Raises:
        RuntimeError: the list is empty, or lists, dtypes, devices or layouts do not match, or
            ``flag`` is not one int32 number; nothing is written then.
    """
    if not inputs:
        raise RuntimeError("multi_tensor_l2norm_scale: inputs must hold at least one tensor.")
    _check_flag(flag, inputs[0])
    squares = call_counted(multi_tensor_scale_squares, inputs, outputs, scale)
    dtype = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
    total = squares.sum().reshape(1)
    flag.masked_fill_(~total.isfinite().reshape(flag.shape), 1)
    norms = squares.sqrt().to(dtype) if per_tensor else squares.new_empty(0, dtype=dtype)
    return total.sqrt().to(dtype), norms


def _check_flag(flag: Tensor, like: Tensor) -> None:
    """As the kernels of the other functions do, before anything is written."""
    if (flag.numel(), flag.dtype, flag.device) != (1, torch.int32, like.device):
        raise RuntimeError(
            "multi_tensor_l2norm_scale: flag must be one int32 number on the device of the tensors "
            f"({describe(like)}), got {describe(flag)}."
        )
