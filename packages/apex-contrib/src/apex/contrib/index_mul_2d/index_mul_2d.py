"""Rows of one matrix, picked by an index, times the rows of another: ``in1[idx1] * in2``."""

from __future__ import annotations

import torch
from torch import Tensor

from .._shared.native.formula import Formula
from .._shared.native.named_functions import NamedFunction
from .._shared.native.operands import check_floating, exact
from .._shared.native.plain import explain, plainness
from . import ops

__all__ = [
    "IndexMul2dBackward_",
    "IndexMul2d_",
    "decompositions",
    "index_mul_2d",
    "index_mul_2d_backward",
]


def _reference(in1: Tensor, in2: Tensor, idx1: Tensor) -> Tensor:
    return in1[idx1] * in2


_index_mul = Formula(
    "index_mul_2d",
    ops.index_mul_2d_forward,
    ops.index_mul_2d_backward,
    _reference,
    saves=("in1", "in2", "idx1"),
    grads=("in1", "in2"),
    rows={"in2": 1, "idx1": 0},
    shared=("in1",),
)
decompositions = _index_mul.decompositions
"""The operators in ATen's, for ``ExportedProgram.run_decompositions``: call it."""


def index_mul_2d(in1: Tensor, in2: Tensor, idx1: Tensor) -> Tensor:
    r"""Pick rows of ``in1`` and multiply them with those of ``in2``: ``in1[idx1] * in2``.

    .. math:: y_{nh} = x_{i_n h} \, w_{nh}

    Args:
        in1: ``[M, H]``; float64, float32, float16 or bfloat16; any layout.
        in2: ``[N, H]``, in the dtype of ``in1`` and on its device.
        idx1: ``[N]`` int64, on the same device, each in ``[-M, M)``: a row of ``in1``, from its end
            if negative, as often as you like.

    Returns:
        ``[N, H]``, dtype and device of ``in1``, contiguous. It may be differentiated any number of
        times. The gradient of ``in1`` is added up in float32 at least (float64 for float64), always
        in the same order: equal input gives equal bits. Autocast changes nothing.

    Raises:
        TypeError: a dtype is not one of those above, or in1's and in2's differ.
        ValueError: shapes or devices do not fit.
        RuntimeError: ``idx1`` has a number that is no row of ``in1``; on a CPU. On a GPU, where the
            check would wait for the device, that row of the result and of the gradient of ``in2``
            is NaN, and it adds nothing to the gradient of ``in1``; nothing is read or written out
            of bounds. Where plain PyTorch computes (``torch.func``, second derivatives, tracing),
            its own check answers: IndexError, or a device-side assertion.

    Source:
        PyTorch's ``in1[idx1] * in2``; Apex's ``apex.contrib.index_mul_2d`` has the same names.

    Example:
        >>> features, weights = torch.randn(10, 64), torch.randn(3, 64)
        >>> index_mul_2d(features, weights, torch.tensor([4, 4, -1])).shape
        torch.Size([3, 64])
    """
    try:
        if (answer := plainness(in1, in2, idx1)) and not in1.is_meta:
            return _index_mul.plain[answer](in1.contiguous(), in2.contiguous(), idx1.contiguous())
    except (AttributeError, RuntimeError):  # of None, and of the operator's checks
        explain(check_operands, in1, in2, idx1)
    check_operands(in1, in2, idx1)
    return _index_mul(exact(in1), exact(in2), exact(idx1))


def check_operands(in1: Tensor, in2: Tensor, idx1: Tensor) -> None:
    """Raise TypeError or ValueError for what the kernels do not take; not for numbers in idx1."""
    name = "index_mul_2d"
    check_floating(name, "in1", in1)
    check_floating(name, "in2", in2)
    if in1.dtype != in2.dtype:
        raise TypeError(f"{name}: in2 is {in2.dtype}, but in1 is {in1.dtype}; cast one.")
    if not isinstance(idx1, Tensor) or idx1.dtype != torch.int64:
        got = idx1.dtype if isinstance(idx1, Tensor) else type(idx1).__name__
        raise TypeError(f"{name}: idx1 must be an int64 tensor, got {got}; use idx1.long().")
    if in1.dim() != 2:
        raise ValueError(f"{name}: in1 must have shape [M, H], got {list(in1.shape)}.")
    if in2.dim() != 2 or in2.shape[1] != in1.shape[1]:
        raise ValueError(
            f"{name}: in2 must have shape [N, {in1.shape[1]}], rows as long as those of in1 "
            f"{list(in1.shape)}, got {list(in2.shape)}."
        )
    if idx1.dim() != 1 or idx1.shape[0] != in2.shape[0]:
        raise ValueError(
            f"{name}: idx1 must have shape [{in2.shape[0]}], one row of in1 for each row of in2 "
            f"{list(in2.shape)}, got {list(idx1.shape)}."
        )
    if in1.shape[0] == 0 < in2.shape[0]:
        raise ValueError(
            f"{name}: in1 {list(in1.shape)} has no rows to pick for in2 {list(in2.shape)}."
        )
    if not in1.device == in2.device == idx1.device:
        raise ValueError(
            f"{name}: in1 is on {in1.device}, but in2 is on {in2.device} and idx1 on "
            f"{idx1.device}; move them to one device."
        )


def index_mul_2d_backward(
    in1: Tensor, in2: Tensor, idx1: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``in1`` and ``in2``, given that of ``in1[idx1] * in2``; may be differentiated.

    Args:
        in1, in2, idx1: as of :func:`index_mul_2d`, whose errors it raises.
        grad_out: ``[N, H]``, dtype and device of ``in2``.
    """
    check_operands(in1, in2, idx1)
    if grad_out.shape != in2.shape or grad_out.dtype != in2.dtype:
        raise ValueError(
            f"index_mul_2d_backward: grad_out must be as in2, {in2.dtype} {list(in2.shape)}, got "
            f"{grad_out.dtype} {list(grad_out.shape)}."
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (in1, in2, grad_out)):
        from .._shared.native.gradients import plain_gradients

        return plain_gradients(_reference, 1, (0, 1), (grad_out,), (in1, in2, idx1))
    return ops.index_mul_2d_backward(grad_out, exact(in1), exact(in2), exact(idx1), True)


class IndexMul2d_(NamedFunction):
    """Apex's class of :func:`index_mul_2d`."""

    apply = staticmethod(index_mul_2d)


class IndexMul2dBackward_(NamedFunction):
    """Apex's class of :func:`index_mul_2d_backward`."""

    apply = staticmethod(index_mul_2d_backward)
