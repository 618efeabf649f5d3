"""Dtypes that operators take, and what becomes of operands before they are called."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from .errors import not_dense

DENSE = (torch.strided, torch.jagged)  # functions answer for nested tensors themselves
_HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float64, torch.float32, *_HALVES)


def check_floating(name: str, argument: str, tensor: Tensor) -> None:
    """Raise unless a tensor is dense and has one of ``FLOATS``; ``name`` is the function's."""
    is_dense = isinstance(tensor, Tensor) and tensor.layout in DENSE
    if is_dense and tensor.dtype in FLOATS:
        return
    if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(
            f"{name}: {argument} must be a float64, float32, float16 or bfloat16 tensor, got {got}."
        )
    raise not_dense(name, argument, tensor)


def exact(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor as kernels take it: contiguous, and in ``dtype`` if one is given.

    Call it before a formula: torch differentiates both by itself.
    """
    tensor = tensor.contiguous()
    return tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)


def are_exact(*tensors: Tensor | None) -> bool:
    """Whether :func:`exact` changes none of them."""
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def as_rows(x: Tensor, dims: int) -> Tensor:
    """``x`` whose last ``dims`` dimensions are one, and at least one before it; itself if it is.

    DTensors that are sharded along these dimensions are gathered.
    """
    if dims == 1 < x.dim():
        return x
    return gather_dims(x, dims).reshape(*(x.shape[:-dims] or (1,)), math.prod(x.shape[-dims:]))


def as_vector(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A weight that all rows share, as kernels take it: of one dimension, :func:`exact`."""
    if parameter is None:
        return None
    if parameter.dim() != 1:
        parameter = gather_dims(parameter, parameter.dim()).reshape(-1)
    return exact(parameter, dtype)


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor; imports nothing: where there is one, it is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def gather_dims(x: Tensor, dims: int) -> Tensor:
    """``x``, gathered along its last ``dims`` dimensions if it is a DTensor."""
    if type(x) is Tensor or not is_dtensor(x):
        return x
    from .shards import row_placements

    return x.redistribute(x.device_mesh, row_placements(x, dims))


def replicate_like(x: Tensor, given: Tensor) -> Tensor:
    """``given``, replicated on the processes of ``x`` where that is a DTensor and it is none."""
    if type(x) is Tensor or not is_dtensor(x) or is_dtensor(given):
        return given
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(given, x.device_mesh, [Replicate()] * x.device_mesh.ndim)


def statistics_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that rows of ``dtype`` are computed in, which their statistics have."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``."""
    if x.is_cpu:  # quicker than x.device.type
        return torch.is_autocast_enabled("cpu")
    device_type = x.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast floating-point tensors to autocast's dtype where it is enabled for the first's device.

    float64 input and its parameters keep their dtype, as everywhere in torch's autocast.
    """
    x = tensors[0]
    if not isinstance(x, Tensor):
        return tensors  # the check that follows says what is wrong
    if not is_autocast(x):
        return tensors
    if x.dtype == torch.float64 or not x.is_floating_point():
        return tensors
    dtype = torch.get_autocast_dtype(x.device.type)
    is_cast = lambda value: isinstance(value, Tensor) and value.is_floating_point()
    return tuple(value.to(dtype) if is_cast(value) else value for value in tensors)


def is_amp(x: Any) -> bool:
    """Whether casts of amp's O1 or O4 are in force for ``x``, and not a script's own autocast.

    Their switch is torch's autocast, so that a kernel sees no difference; amp's handle tells it.
    apex-amp is another wheel, and imports nothing here: where it casts, it is imported.
    """
    if not isinstance(x, Tensor) or not is_autocast(x):
        return False
    module = sys.modules.get("apex.amp._amp_state")
    handle = None if module is None else getattr(module._amp_state, "handle", None)
    return handle is not None and handle.is_active()


def amp_to_float32(*tensors: Any) -> tuple[Any, ...]:
    """Cast 16-bit tensors to float32 where amp casts for the first: so do norms in Apex's lists."""
    if not is_amp(tensors[0]):
        return tensors
    is_half = lambda value: isinstance(value, Tensor) and value.dtype in _HALVES
    return tuple(value.float() if is_half(value) else value for value in tensors)


def autocast_norm(*tensors: Any) -> tuple[Any, ...]:
    """:func:`autocast` for a norm, or :func:`amp_to_float32` where amp casts."""
    return amp_to_float32(*tensors) if is_amp(tensors[0]) else autocast(*tensors)
