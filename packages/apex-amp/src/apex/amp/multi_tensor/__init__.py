"""The ops with which amp unscales gradients: a scaled copy and a weighted sum of tensor lists."""

from __future__ import annotations

from torch import Tensor

from .._ops import library

__all__ = ["axpby", "scale", "scale_"]


@library.define(
    "scale(Tensor[] inputs, Tensor(a!)[] outputs, Tensor(b!) found_inf, float scale) -> ()"
)
def scale(inputs: list[Tensor], outputs: list[Tensor], found_inf: Tensor, scale: float) -> None:
    """``outputs[i] = inputs[i] * scale``, and a test for inf and NaN, in one pass over memory.

    Args:
        inputs: float64, float32, float16 or bfloat16, all of one dtype and device; any shapes,
            dense in memory.
        outputs: as many tensors, of the sizes and strides of ``inputs``; of any of these dtypes
            (float64 only for float64 inputs). They may be the tensors of ``inputs``.
        found_inf: int32 ``[1]`` on the same device. Set to 1 if any input is inf or NaN, else left
            as it is; outputs are written in either case.
        scale: factor; the product is taken in float32 (float64 for float64) and rounded once.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match; nothing is changed then.
    """


@library.define("scale_(Tensor(a!)[] tensors, Tensor(b!) found_inf, float scale) -> ()")
def scale_(tensors: list[Tensor], found_inf: Tensor, scale: float) -> None:
    """:func:`scale` in place: half the lists to read, and one stream of memory.

    Args:
        tensors: as ``inputs`` of :func:`scale`.
        found_inf: likewise.
        scale: likewise.

    Raises:
        RuntimeError: dtypes or devices differ, or a layout has gaps; nothing is changed then.
    """


@library.define(
    "axpby(Tensor[] xs, Tensor[] ys, Tensor(a!)[] outputs, Tensor(b!) found_inf, float a, float b, "
    "int arg_to_check) -> ()"
)
def axpby(
    xs: list[Tensor],
    ys: list[Tensor],
    outputs: list[Tensor],
    found_inf: Tensor,
    a: float,
    b: float,
    arg_to_check: int,
) -> None:
    """``outputs[i] = a * xs[i] + b * ys[i]``, and a test for inf and NaN, in one pass over memory.

    Args:
        xs: as ``inputs`` of :func:`scale`.
        ys: as many tensors, of the sizes and strides of ``xs`` and the dtype of ``outputs``.
        outputs: likewise; they may be the tensors of ``xs`` or ``ys``.
        found_inf: int32 ``[1]`` on the same device. Set to 1 if a tested value is inf or NaN, else
            left as it is.
        a, b: factors; the sum is taken in float32 (float64 for float64) and rounded once.
        arg_to_check: which values are tested: 0 for ``xs``, 1 for ``ys``, -1 for both.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match; nothing is changed then.
    """
