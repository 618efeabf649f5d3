"""clip_grad_norm_: torch's function, with one pass for the norm and one for the scaling."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from .._shared.native.plain import plainness
from .._shared.native.writes import call_counted
from .ops import clip_grad_, clip_grad_total_norm

__all__ = ["clip_grad_norm_"]

_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_TYPES = {Tensor, torch.nn.Parameter}
_ORDERS = (1.0, 2.0, float("inf"))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    The norm is that of all gradients as one vector. Each is multiplied by
    ``max_norm / (norm + 1e-6)`` where that is below 1.

    Args:
        parameters: a tensor or an iterable of tensors. Those without a gradient are ignored.
        max_norm: the largest norm that is left as it is.
        norm_type: the order of the norm, ``inf`` for the largest absolute value. Kernels compute
            the orders 1, 2 and infinity, and torch all others.
        error_if_nonfinite: raise RuntimeError where the norm is inf or NaN, and change no gradient;
            this waits for the device.
        foreach: as torch's function takes it, where that answers. Kernels always take all gradients
            of a dtype at once.

    Returns:
        The norm before clipping, without dimensions, on the device of the first gradient: float32,
        float64 where a gradient is float64. Without gradients it is ``tensor(0.)``. Where torch
        computes, dtype and type (a DTensor, say) are torch's.

    Kernels take float64, float32, float16 and bfloat16 on CPUs and GPUs, several dtypes and devices
    at once. torch's function answers for DTensors and other subclasses, sparse and complex
    gradients, gradients with gaps in memory, and tensors that the list holds twice.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite``; no gradient changes.
        TypeError: ``parameters`` is a module.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    else:
        if isinstance(given := parameters, torch.nn.Module):
            _check_is_list(given)
        parameters = list(given)
        if not parameters and isinstance(given, types.GeneratorType):
            warnings.warn(
                "clip_grad_norm_: `parameters` is an empty generator, so nothing is clipped. "
                "Pass a list if it was read before.",
                stacklevel=3,  # past the wrapper of no_grad
            )
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    max_norm, norm_type = float(max_norm), float(norm_type)
    groups, norms = _norms(grads, norm_type) if norm_type in _ORDERS else ([], [])
    if not groups:
        return torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )

    device, total = grads[0].device, norms[0]
    if len(norms) > 1:
        stacked = torch.cat([norm.to(device) for norm in norms])
        total = torch.linalg.vector_norm(stacked, norm_type).reshape(1)
    has_double = any(group[0].dtype == torch.float64 for group in groups)
    result = total[0] if has_double else total[0].float()
    if error_if_nonfinite and not torch.isfinite(result):
        raise RuntimeError(
            f"clip_grad_norm_: the total norm of order {norm_type} is {result.item()}, expected a "
            "finite number. Look for the gradient that is inf or NaN, or pass "
            "error_if_nonfinite=False to scale by it anyway. No gradient was changed."
        )
    for group in groups:
        call_counted(clip_grad_, group, total.to(group[0].device), max_norm)
    return result


def _check_is_list(parameters: torch.nn.Module) -> None:
    if not isinstance(parameters, torch.nn.ParameterList):
        kind = type(parameters).__name__
        raise TypeError(
            f"clip_grad_norm_: parameters is a {kind}; pass its parameters: model.parameters()."
        )


def _norms(grads: list[Tensor], norm_type: float) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The gradients in groups that a kernel takes, and each group's norm; nothing if none does."""
    if not _are_distinct(grads):
        return [], []
    if plainness() and len({grad.dtype for grad in grads}) == 1 and not grads[0].is_meta:
        try:
            return [grads], [clip_grad_total_norm(grads, norm_type)]
        except RuntimeError:
            if _suit_kernels(grads) and len(_grouped(grads)) == 1:  # it is of something else
                raise
    groups = _grouped(grads) if _suit_kernels(grads) else []
    return groups, [clip_grad_total_norm(group, norm_type) for group in groups]


def _are_distinct(grads: list[Tensor]) -> bool:
    """Whether all are plain tensors, none of them twice; no frame for each."""
    return set(map(type, grads)) <= _TYPES and len(set(map(id, grads))) == len(grads)


def _suit_kernels(grads: list[Tensor]) -> bool:
    return (
        {grad.dtype for grad in grads} <= _DTYPES
        and {grad.layout for grad in grads} == {torch.strided}
        and all(device.type in ("cpu", "cuda") for device in {grad.device for grad in grads})
        and all(grad.is_contiguous() or _is_dense(grad) for grad in grads)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps or overlaps: empty_like keeps the strides of no other."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _grouped(grads: list[Tensor]) -> list[list[Tensor]]:
    """The gradients by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(groups.values())
