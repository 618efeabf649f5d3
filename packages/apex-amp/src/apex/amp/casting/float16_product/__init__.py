"""The product of small float16 matrices on the CPU, in the place of torch's scalar loops."""

from __future__ import annotations

from torch import Tensor

from ..._ops import library

__all__ = ["float16_product"]


@library.define(
    "float16_product(Tensor? added, Tensor a, Tensor b, float beta=1, float alpha=1) -> Tensor"
)
def float16_product(
    added: Tensor | None, a: Tensor, b: Tensor, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """``beta * added + alpha * a @ b``, summed in float32 and rounded once.

    One thread computes it, for the thousands of multiplications that torch leaves to scalar loops.

    Args:
        added: float16, of the result's shape or expandable to it; None adds nothing. It is not read
            if ``beta`` is 0.
        a: float16 ``[M, K]``, or ``[batch, M, K]``; any strides, on the CPU.
        b: the same, ``[K, N]`` or ``[batch, K, N]``.
        beta, alpha: factors, used in float32.

    Returns:
        float16 ``[M, N]`` or ``[batch, M, N]``, contiguous.

    Raises:
        RuntimeError: shapes or dtypes do not go together.
        NotImplementedError: tensors on a GPU, where torch's products are fast.
    """
    return a.new_empty((*a.shape[:-1], b.shape[-1]))
