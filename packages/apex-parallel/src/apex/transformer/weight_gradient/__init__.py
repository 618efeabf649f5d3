"""Adds a linear layer's weight gradient to a float32 buffer, by cuBLASLt and hipBLASLt."""

from __future__ import annotations

from torch import Tensor

from ...parallel._ops import library
from ...parallel._shared.native.blaslt import log_refusal, may_serve

__all__ = ["add_weight_gradient"]


@library.define(
    "add_weight_gradient_blaslt(Tensor x, Tensor dy, Tensor(a!) main_grad) -> int outcome"
)
def add_weight_gradient_blaslt(x: Tensor, dy: Tensor, main_grad: Tensor) -> int:
    """``main_grad += dy.T @ x``: products of 16-bit numbers, added up in float32.

    ``x`` ``[tokens, in]`` and ``dy`` ``[tokens, out]`` are of one dtype, ``main_grad`` is float32
    ``[out, in]``; all are contiguous. Nothing is written unless the outcome is 0; see
    ``apex/torch/blaslt.h``.
    """
    return 0


def add_weight_gradient(x: Tensor, dy: Tensor, main_grad: Tensor) -> bool:
    """``main_grad += dy.T @ x`` if the library serves, and whether it did."""
    if not may_serve(x, dy, main_grad) or dy.numel() == 0:
        return False
    outcome = add_weight_gradient_blaslt(x, dy, main_grad)
    if outcome:
        log_refusal("weight gradient", outcome)
    return not outcome
