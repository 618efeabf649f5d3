"""The multi_tensor_l2norm operator: schema, documentation and fake kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from apex.optimizers._ops import library

__all__ = ["multi_tensor_l2norm"]


@library.define(
    "multi_tensor_l2norm(Tensor[] inputs, Tensor(b!)? flag=None, bool per_tensor=False, "
    "bool wide=False) -> (Tensor, Tensor)"
)
def multi_tensor_l2norm(
    inputs: list[Tensor],
    flag: Tensor | None = None,
    per_tensor: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """Euclidean norm of all elements of a list of tensors, and of each tensor.

    ``norm = sqrt(sum over i and j of inputs[i][j]**2)``

    Args:
        inputs: at least one tensor; one dtype (float64, float32, float16 or bfloat16), one device;
            any shapes, dense memory.
        flag: int32, one element, on the same device; set to 1 where an element is inf or NaN, or
            where squares of float64 elements overflow (beyond 1e154).
        per_tensor: give each tensor's norm, too.
        wide: give float64 norms of all inputs.

    Returns:
        ``norm`` [1] and ``norms`` [len(inputs)], or [0] without ``per_tensor``: float32, or float64
        with ``wide`` and for float64 inputs. A tensor without elements has the norm 0.

    Squares are summed in chunks of 65,536 elements, the chunks in float64 and in a fixed order:
    results do not depend on the number of threads. A chunk whose sum leaves the range of float32 is
    summed in float64, so that no finite input of up to 32 bits gives an infinite or a zero sum of
    squares.

    Raises:
        RuntimeError: the list is empty, or dtypes, devices or layouts do not match.
    """
    is_wide = wide or inputs[0].dtype == torch.float64
    dtype = torch.float64 if is_wide else torch.float32
    norm = inputs[0].new_empty(1, dtype=dtype)
    return norm, norm.new_empty(len(inputs) if per_tensor else 0)
