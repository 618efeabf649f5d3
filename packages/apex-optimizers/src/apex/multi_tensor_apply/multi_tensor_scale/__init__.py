"""The multi_tensor_scale operator: schema, documentation and fake kernel."""

from __future__ import annotations

from torch import Tensor

from apex.optimizers._ops import library

__all__ = ["multi_tensor_scale"]


@library.define(
    "multi_tensor_scale(Tensor[] inputs, Tensor(b!)[] outputs, Tensor(c!) flag, float scale) -> ()"
)
def multi_tensor_scale(
    inputs: list[Tensor], outputs: list[Tensor], flag: Tensor, scale: float
) -> None:
    """``outputs[i] = inputs[i] * scale``, and ``flag = 1`` where an input is inf or NaN.

    Args:
        inputs: one dtype, one device; any shapes, dense memory.
        outputs: as many tensors, each with the number of elements and the memory format of the
            input at its index. Their dtype is independent: float64, float32, float16, bfloat16.
            They may be the inputs themselves. They are written whatever the flag.
        flag: int32, one element, on the same device. Set to 1 where an element of ``inputs`` is
            not finite, never to 0.
        scale: a factor, without unit.

    The product is taken in float32, in float64 where a list is float64, and rounded once.

    Raises:
        RuntimeError: lists, dtypes, devices or layouts do not match; nothing is written then.
    """
