"""The operators of clip_grad_norm_: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import library


@library.define("norm_of_list(Tensor[] tensors, bool largest) -> Tensor")
def norm_of_list(tensors: list[Tensor], largest: bool) -> Tensor:
    """Euclidean norm of all elements of a list, or with ``largest`` the largest absolute value.

    Args:
        tensors: at least one; one dtype (float64, float32, float16, bfloat16), one device; any
            shapes, dense memory.

    Returns:
        A number, float32, or float64 for float64. Squares are summed in chunks, the chunks in
        float64 and in a fixed order; a chunk whose sum leaves float32's range is summed in float64.

    Raises:
        RuntimeError: the list is empty, or dtypes, devices or layouts do not match.
    """
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return tensors[0].new_empty((), dtype=dtype)


@library.define("scale_list_(Tensor(a!)[] tensors, Tensor factor) -> ()")
def scale_list_(tensors: list[Tensor], factor: Tensor) -> None:
    """``tensors[i] *= factor``; a factor of 1 writes nothing.

    Args:
        tensors: as of :func:`norm_of_list`; no two share memory. The product is rounded once.
        factor: a number, float32, or float64 for float64, on their device.

    Raises:
        RuntimeError: dtypes, devices or layouts do not match; nothing is written then.
    """
