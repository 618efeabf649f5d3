"""Unscaling one gradient at a time, in plain torch; for scripts that call it.

amp itself unscales whole lists in one pass (:mod:`apex.amp.multi_tensor`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["PythonUnscaling", "axpby_check_overflow_python", "scale_check_overflow_python"]

Grads = Sequence[Tensor | None]


def scale_check_overflow_python(
    model_grad: Tensor, master_grad: Tensor, scale: float, check_overflow: bool = False
) -> bool:
    """``master_grad = model_grad * scale``, unless ``model_grad`` has an inf or NaN.

    Args:
        model_grad: dense or sparse.
        master_grad: written; dense, or ``model_grad`` itself.
        scale: factor.
        check_overflow: look for inf and NaN.

    Returns:
        Whether there was one; then nothing is written.
    """
    if check_overflow and not _is_finite(model_grad):
        return True
    with torch.no_grad():
        if master_grad is not model_grad:
            master_grad.copy_(model_grad.to_dense() if model_grad.is_sparse else model_grad)
        if scale != 1.0:
            master_grad.mul_(scale)
    return False


def axpby_check_overflow_python(
    model_grad: Tensor | None,
    stashed_grad: Tensor | None,
    master_grad: Tensor,
    a: float,
    b: float,
    check_overflow: bool = False,
) -> bool:
    """``master_grad = a * model_grad + b * stashed_grad``, unless ``model_grad`` has an inf or NaN.

    Args:
        model_grad: dense or sparse; None counts as zeros.
        stashed_grad: in the dtype of ``master_grad``; None counts as zeros.
        master_grad: written.
        a, b: factors.
        check_overflow: look for inf and NaN in ``model_grad``.

    Returns:
        Whether there was one; then nothing is written.

    Raises:
        TypeError: ``stashed_grad`` and ``master_grad`` differ in dtype.
    """
    if stashed_grad is not None and stashed_grad.dtype is not master_grad.dtype:
        raise TypeError(
            f"axpby_check_overflow_python: stashed_grad is {stashed_grad.dtype}, master_grad "
            f"{master_grad.dtype}; expected one dtype."
        )
    if check_overflow and model_grad is not None and not _is_finite(model_grad):
        return True
    with torch.no_grad():
        total = torch.zeros_like(master_grad)
        for grad, factor in ((model_grad, a), (stashed_grad, b)):
            if grad is not None:
                dense = grad.to_dense() if grad.is_sparse else grad
                total += factor * dense.to(master_grad.dtype)
        master_grad.copy_(total)
    return False


class PythonUnscaling:
    """The methods of a loss scaler that go through the functions above."""

    dynamic: bool
    _has_overflow: bool
    warned_unscaling_non_fp32_grad = False

    def unscale_python(self, model_grads: Grads, master_grads: Grads, scale: float) -> None:
        """``master = model / scale`` pair by pair, where neither is None.

        Args:
            model_grads, master_grads: lists of one length.
            scale: divisor. With a dynamic loss scale the first inf or NaN ends the loop and is
                noted.
        """
        for model, master in zip(model_grads, master_grads, strict=True):
            if model is None or master is None:
                continue
            self._warn_of_16_bits(master)
            if scale_check_overflow_python(model, master, 1.0 / scale, self.dynamic):
                self._has_overflow = True
                return

    def unscale_with_stashed_python(
        self,
        model_grads: Grads,
        stashed_master_grads: Grads,
        master_grads: Grads,
        a: float,
        b: float,
    ) -> None:
        """``master = a * model + b * stashed`` triple by triple; as :meth:`unscale_python`."""
        triples = zip(model_grads, stashed_master_grads, master_grads, strict=True)
        for model, stashed, master in triples:
            if master is None or (model is None and stashed is None):
                continue
            self._warn_of_16_bits(master)
            if axpby_check_overflow_python(model, stashed, master, a, b, self.dynamic):
                self._has_overflow = True
                return

    def _warn_of_16_bits(self, master: Tensor) -> None:
        if master.dtype is not torch.float32 and not self.warned_unscaling_non_fp32_grad:
            type(self).warned_unscaling_non_fp32_grad = True
            warnings.warn(
                f"LossScaler: unscaling a gradient in {master.dtype}, where small values are lost; "
                "master gradients should be float32.",
                stacklevel=3,
            )


def _is_finite(grad: Tensor) -> bool:
    values = grad.coalesce().values() if grad.is_sparse else grad
    return bool(torch.isfinite(values).all())
