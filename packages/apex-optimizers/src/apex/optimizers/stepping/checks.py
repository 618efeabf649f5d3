"""Checks before a step, so that one that fails changes nothing; messages name what is wrong."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._ops import library
from .._shared.native.errors import check_is_no_text
from .sharding import differ_in_placement, is_sharded

SEED = "rounding_seed"  # of a group
SMALL_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_form_of = operator.attrgetter("shape", "dtype", "device", "layout")
_PLAIN = {Tensor, torch.nn.Parameter}

# Hyper-parameters that are handed to operators as numbers, beside betas.
_NUMBERS = (
    "lr",
    "eps",
    "weight_decay",
    "max_grad_norm",
    "momentum",
    "dampening",
    "trust_coefficient",
)
_EXACT = {float, int}

# Those that groups must have in the range >= 0, if an optimizer has them.
NOT_NEGATIVE = (
    "momentum",
    "eps",
    "weight_decay",
    "max_grad_norm",
    "trust_coefficient",
    "initial_accumulator_value",
)


def check_lr(optimizer: str, lr: Any) -> None:
    """Raise unless ``lr`` is >= 0, a number or a tensor of one element.

    A tensor on a GPU is not read: that would wait for the device.
    """
    if lr is None:
        raise ValueError(f"{optimizer}: lr must be given, to the optimizer or to every group.")
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"{optimizer}: lr must have one element, got shape {list(lr.shape)}.")
        if not lr.is_cpu:
            return
        lr = lr.item()
    check_is_no_text(optimizer, "lr", lr)
    if not lr >= 0:
        raise ValueError(f"{optimizer}: lr must be >= 0, got {lr}.")


def check_not_negative(optimizer: str, group: dict[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError for the first of these hyper-parameters that is negative or NaN."""
    for name in names:
        if not group[name] >= 0:
            raise ValueError(f"{optimizer}: {name} must be >= 0, got {group[name]}.")


def check_numbers(optimizer: str, groups: Iterable[dict[str, Any]], call: str = "") -> None:
    """Raise TypeError or ValueError for the first hyper-parameter that is no number."""
    for group in groups:
        for name in _NUMBERS:
            if name in group and type(group[name]) not in _EXACT:
                _check_number(optimizer + call, name, group[name])
        betas = group.get("betas", (0.0, 0.0))
        if type(betas) is not tuple or [*map(type, betas)] != [float, float]:
            _check_number(optimizer + call, "betas", betas)


def _check_number(owner: str, name: str, value: Any) -> None:
    parts = value if name == "betas" and isinstance(value, (tuple, list)) else [value]
    for part in parts:
        if type(part) is float:
            continue
        is_one = part.numel() == 1 if isinstance(part, Tensor) else isinstance(part, numbers.Real)
        if not is_one:
            check_is_no_text(owner, name, part)
            raise TypeError(f"{owner}: {name} of a group must be a number, got {value!r}.")
    if name == "betas" and len(parts) != 2:
        raise ValueError(f"{owner}: betas of a group must be two numbers, got {value!r}.")


def check_betas(optimizer: str, betas: tuple[float, float]) -> None:
    """Raise ValueError unless both decays are in [0, 1)."""
    for index, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"{optimizer}: betas[{index}] must be in [0, 1), got {beta}.")


def check_params(optimizer: str, params: list[Tensor]) -> None:
    """Raise TypeError for the first parameter whose dtype has no kernel."""
    for index, param in enumerate(params):
        if state_dtype(param) is None:
            raise TypeError(
                f"{optimizer}: params[{index}] must be float64, float32, float16, bfloat16, "
                f"complex64 or complex128, got {describe(param)}."
            )


def check_duplicates(optimizer: str, params: list[Tensor]) -> None:
    """Raise ValueError if a parameter stands twice in a list: one launch would update it twice."""
    first: dict[int, int] = {}
    for index, param in enumerate(params):
        if first.setdefault(id(param), index) != index:
            raise ValueError(
                f"{optimizer}: params[{index}] is params[{first[id(param)]}]; a parameter can be "
                "in an optimizer only once."
            )


# Folders and device types: asking takes longer than the rest. No lock: entries are only added.
_found: set[tuple[Path, str]] = set()


def require_kernels(optimizer: str, folder: Path, params: Sequence[Tensor]) -> None:
    """Raise RuntimeError if the operators in ``folder`` cannot run; nothing is built here.

    Parameters that are on the CPU now may be moved to a GPU before the first step.
    """
    for device_type in {param.device.type for param in params} & {"cpu", "cuda"}:
        if (folder, device_type) not in _found and not (
            device_type == "cpu" and torch.cuda.is_available() and library.available(folder, "cuda")
        ):
            library.require(folder, optimizer, device_type)
        _found.add((folder, device_type))


_STATE_DTYPES = {
    dtype: torch.float32 if dtype.itemsize == 2 else dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
} | {dtype: dtype for dtype in (torch.complex64, torch.complex128)}


def state_dtype(param: Tensor) -> torch.dtype | None:
    """Dtype of the moments of a parameter; None if the parameter's dtype is not supported."""
    return _STATE_DTYPES.get(param.dtype)


def check_seed(optimizer: str, group: dict[str, Any]) -> None:
    """Raise ValueError unless a group's seed fits into 32 bits, which leaves 32 for its bucket."""
    seed = group.get(SEED, 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"{optimizer}: {SEED} must be an int in [0, 2**32), got {seed!r}.")


def check_rounded(where: str, params: Sequence[Tensor]) -> None:
    """Raise TypeError for the first parameter that is rounded, but not by chance: of float16."""
    for index, param in enumerate(params):
        if param.dtype == torch.float16:
            raise TypeError(
                f"{where}: stochastic_rounding is for bfloat16 parameters (float32 and float64 "
                f"ones keep small updates), but params[{index}] is {describe(param)}. Use "
                "bfloat16, or masters instead."
            )


def check_gradients(
    op: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    any_dtype: bool = False,
    forms: Sequence[Any] | None = None,
) -> None:
    """Raise a clear error for the first gradient that a fused step cannot use.

    Args:
        any_dtype: gradients may be of another dtype than their parameter, of up to 32 bits.
        forms: :func:`forms_of` the parameters, if known.

    Raises:
        RuntimeError: a gradient is sparse, its shape, dtype or device is not its parameter's, or
            it has no memory.
    """
    if forms is None:
        forms = forms_of(params)
    if _PLAIN.issuperset(map(type, grads)) and list(map(_form_of, grads)) == forms:
        check_allocated(op, "the gradient of parameter", grads)
        return
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{op}: the gradient of parameter {index} is sparse ({grad.layout}), which fused "
                "optimizers do not support; use torch.optim.SparseAdam or torch.optim.SGD for it."
            )
        if differ_in_placement(param, grad):
            raise RuntimeError(
                f"{op}: parameter {index} and its gradient are not sharded alike: {_placed(param)} "
                f"and {_placed(grad)}. Redistribute the gradient to the parameter's placements."
            )
        may_differ = any_dtype and not param.is_complex()
        is_typed = grad.dtype == param.dtype or (may_differ and grad.dtype in SMALL_FLOATS)
        if not is_typed or (grad.shape, grad.device) != (param.shape, param.device):
            expected = (
                "be float32, float16 or bfloat16 and have shape"
                if may_differ
                else "have shape, dtype"
            )
            raise RuntimeError(
                f"{op}: parameter {index} and its gradient differ: {describe(param)} and "
                f"{describe(grad)}. Gradients must {expected} and device of their "
                "parameter; cast them, or use apex.amp."
            )
    check_allocated(op, "the gradient of parameter", grads)


def forms_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Shape, dtype, device and layout of each tensor."""
    return list(map(_form_of, tensors))


def check_allocated(op: str, what: str, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError for the first tensor with elements whose memory was given back.

    Args:
        what: the tensors, for the message, without their number.
    """
    if 0 not in map(Tensor.data_ptr, tensors):
        return
    for index, tensor in enumerate(tensors):
        if is_sharded(tensor) or tensor.device.type not in ("cpu", "cuda") or not tensor.numel():
            continue
        if tensor.data_ptr() == 0:
            raise RuntimeError(
                f"{op}: {what} {index} is {describe(tensor)}, but its data is not allocated yet: "
                "its storage was resized to 0 bytes, as FSDP does with parameters that it has "
                "gathered. Step when the memory is allocated."
            )


def check_states(
    op: str, params: Sequence[Tensor], states: Sequence[dict[str, Any]], keys: Sequence[str]
) -> None:
    """Raise RuntimeError for the first state that was made for another parameter, or is freed."""
    for index, (param, state) in enumerate(zip(params, states, strict=True)):
        for key in keys:
            if key in state and not _has_shape(state[key], param.shape):
                got = describe(state[key]) if isinstance(state[key], Tensor) else repr(state[key])
                raise RuntimeError(
                    f"{op}: state {key!r} of parameter {index} is {got}, but the parameter is "
                    f"{describe(param)}. Replace the state by one of this shape, or remove the "
                    "parameter's entry from optimizer.state, which makes a new one."
                )
    for key in keys:
        kept = [state[key] for state in states if key in state]
        check_allocated(op, f"state {key!r}", kept)


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def check_dense(op: str, params: Sequence[Tensor]) -> None:
    """Raise RuntimeError for the first parameter whose elements do not fill its memory, or are the
    conjugates of what is there.
    """
    check_allocated(op, "parameter", params)
    for index, param in enumerate(params):
        if param.is_conj():
            raise RuntimeError(
                f"{op}: parameter {index}, {describe(param)}, is a conjugated view of other "
                "memory. Optimize what it is a view of, or its resolve_conj()."
            )
        if not (param.is_contiguous() or _is_dense(param)):
            raise RuntimeError(
                f"{op}: parameter {index}, {describe(param)}, was not contiguous in any memory "
                f"format: its strides are {list(param.stride())}. Optimize the tensor that it is a "
                "view of, or a contiguous copy."
            )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill memory without gaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _placed(tensor: Tensor) -> str:
    if not is_sharded(tensor):
        return "a plain tensor"
    return f"{tuple(tensor.placements)} on {tensor.device_mesh}"


def describe(tensor: Tensor) -> str:
    """Shape, dtype and device for messages: ``[4, 3] float32 on cuda:0``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype} on {tensor.device}"
