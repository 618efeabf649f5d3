"""Gradients clipped by their common norm, in two launches for each dtype and device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .._shared.native.writes import call_counted
from . import ops

__all__ = ["clip_grad_norm_"]

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    r"""Scale gradients in place so that the norm of all of them together is at most ``max_norm``.

    .. math:: g \leftarrow g \cdot \min(1, \mathrm{max\_norm} / (\lVert g \rVert + 10^{-6}))

    Args:
        parameters: a tensor or several; those without a gradient are left out.
        max_norm: the largest norm.
        norm_type: 2 and inf run the kernels; any other p is computed by torch.
        error_if_nonfinite: raise if the norm is inf or NaN, which waits for the device.

    Returns:
        The norm before scaling, on the device of the first gradient: float32, or float64 if a
        gradient is float64; 0 without gradients.

    Gradients may be of any dtypes and on any devices. ``torch.nn.utils.clip_grad_norm_`` computes
    sparse gradients, DTensors, complex numbers, gradients that require gradients, and a gradient
    that is given twice.

    Raises:
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite; nothing is scaled then. Or
            there are no kernels for a device, and none can be built.

    Source:
        Pascanu et al. 2013, https://arxiv.org/abs/1211.5063; torch's function of this name.

    Example:
        >>> linear = torch.nn.Linear(4, 4)
        >>> linear(torch.ones(2, 4)).sum().backward()
        >>> norm = clip_grad_norm_(linear.parameters(), max_norm=1.0)
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not grads:
        return torch.tensor(0.0)
    if norm_type not in (2.0, torch.inf) or not _are_plain(grads):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    strided = []  # has gaps, so that the kernels cannot walk it
    for grad in grads:
        if grad.is_contiguous() or _is_dense(grad):
            groups.setdefault((grad.device, grad.dtype), []).append(grad)
        else:
            strided.append(grad)
    norms = [ops.norm_of_list(group, norm_type != 2.0) for group in groups.values()]
    norms += [_norm(grad, norm_type) for grad in strided]
    total = norms[0]
    if len(norms) > 1:
        dtype = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
        each = [norm.to(grads[0].device, dtype) for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(each), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for (device, dtype), group in groups.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        call_counted(ops.scale_list_, group, factor.to(device, wide))
    for grad in strided:
        grad.mul_(factor.to(grad.device))
    return total


def _are_plain(grads: list[Tensor]) -> bool:
    """Whether all are what the kernels know, and each is there once."""
    return len(set(map(id, grads))) == len(grads) and all(
        type(grad) is Tensor
        and grad.layout == torch.strided
        and grad.dtype in _FLOATS
        and not grad.requires_grad
        for grad in grads
    )


def _is_dense(grad: Tensor) -> bool:
    """Whether the memory between the first and the last element is all its own."""
    end = 1
    for stride, size in sorted(zip(grad.stride(), grad.shape, strict=True)):
        if size != 1 and stride != end:
            return False
        end *= size
    return True


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(grad, norm_type, dtype=dtype)
