"""The multi_tensor_axpby operator: schema, documentation and fake kernel."""

from __future__ import annotations

from torch import Tensor

from apex.optimizers._ops import library

__all__ = ["multi_tensor_axpby"]


@library.define(
    "multi_tensor_axpby(Tensor[] xs, Tensor[] ys, Tensor(c!)[] outputs, Tensor(d!) flag, "
    "float a, float b, int arg_to_check=-1) -> ()"
)
def multi_tensor_axpby(
    xs: list[Tensor],
    ys: list[Tensor],
    outputs: list[Tensor],
    flag: Tensor,
    a: float,
    b: float,
    arg_to_check: int = -1,
) -> None:
    """``outputs[i] = a * xs[i] + b * ys[i]``, and ``flag = 1`` where an operand is inf or NaN.

    Args:
        xs, ys, outputs: lists of one length on one device. Each has one dtype of its own: float32,
            float16 or bfloat16 in any combination, or float64 for all three. Tensors at one index
            have the same number of elements and memory format. ``outputs`` may be ``xs`` or ``ys``.
        flag: int32, one element, on the same device; set to 1, never to 0.
        a, b: factors, without unit.
        arg_to_check: whose elements are tested: 0 for ``xs``, 1 for ``ys``, -1 for both.

    The sum is taken in float32 (float64 for float64 lists) and rounded once.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match; nothing is written then.
    """
