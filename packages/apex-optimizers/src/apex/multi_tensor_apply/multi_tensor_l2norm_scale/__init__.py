"""multi_tensor_l2norm_scale: a scaled copy of lists of tensors and their norm, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from apex.optimizers._ops import library
from apex.optimizers._shared.native.writes import call_counted
from apex.optimizers.stepping.checks import describe

__all__ = ["multi_tensor_l2norm_scale", "multi_tensor_scale_norms"]


@library.define(
    "multi_tensor_scale_norms(Tensor[] inputs, Tensor(b!)[] outputs, Tensor(c!) flag, float scale, "
    "bool per_tensor) -> (Tensor, Tensor)"
)
def multi_tensor_scale_norms(
    inputs: list[Tensor], outputs: list[Tensor], flag: Tensor, scale: float, per_tensor: bool
) -> tuple[Tensor, Tensor]:
    """What :func:`multi_tensor_l2norm_scale` does. Squares are added in chunks of 65,536 elements,
    in float64 and in a fixed order."""
    dtype = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
    norm = inputs[0].new_empty(1, dtype=dtype)
    return norm, norm.new_empty(len(inputs) if per_tensor else 0)


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
    return call_counted(multi_tensor_scale_norms, inputs, outputs, flag, scale, per_tensor)


def _check_flag(flag: Tensor, like: Tensor) -> None:
    """As the kernels of the other functions do, before anything is written."""
    if (flag.numel(), flag.dtype, flag.device) != (1, torch.int32, like.device):
        raise RuntimeError(
            "multi_tensor_l2norm_scale: flag must be one int32 number on the device of the tensors "
            f"({describe(like)}), got {describe(flag)}."
        )
