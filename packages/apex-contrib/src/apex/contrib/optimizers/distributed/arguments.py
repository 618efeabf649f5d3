"""Checks of DistributedFusedAdam's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ..._shared.native.errors import check_is_no_module

NAME = "DistributedFusedAdam"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WIDE = (torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_dtypes(
    dtype: torch.dtype, grad_sync_dtype: torch.dtype, param_sync_dtype: torch.dtype
) -> None:
    """Raise ValueError unless states, gradients and parameters sent are of dtypes that we know."""
    if param_sync_dtype not in (torch.float64, *FLOATS, *INTEGERS):
        raise ValueError(
            f"{NAME}: param_sync_dtype must be torch.float64, float32, float16, bfloat16 or an "
            f"integer dtype, which stands for the leading bytes, got {param_sync_dtype}."
        )
    for name, value in (("dtype", dtype), ("grad_sync_dtype", grad_sync_dtype)):
        if value not in FLOATS:
            raise ValueError(
                f"{NAME}: {name} must be torch.float32, float16 or bfloat16, got {value}."
            )


def check_options(given: dict[str, Any], params: Any) -> None:
    """Raise for a module, and for options that exclude each other, of the constructor's."""
    check_is_no_module(NAME, params)
    dtype, sync = given["dtype"], given["param_sync_dtype"] or given["dtype"]
    if given["amsgrad"]:
        raise RuntimeError(f"{NAME}: amsgrad=True is not supported; use torch.optim.AdamW.")
    check_dtypes(dtype, given["grad_sync_dtype"] or dtype, sync)
    if given["capturable"] and (given["with_scaled_states"] or given["store_param_remainders"]):
        raise RuntimeError(
            f"{NAME}: capturable=True works with neither with_scaled_states nor "
            "store_param_remainders; leave one of them out."
        )
    if given["store_param_remainders"]:
        if given["store_params"]:
            raise RuntimeError(
                f"{NAME}: store_param_remainders=True keeps what bfloat16 parameters lack, instead "
                "of whole parameters; pass store_params=False, too."
            )
        if dtype != torch.float32 or sync != torch.bfloat16:
            raise RuntimeError(
                f"{NAME}: store_param_remainders=True needs dtype=torch.float32 and "
                f"param_sync_dtype=torch.bfloat16, got {dtype} and {sync}."
            )
    if given["with_scaled_states"]:
        fits = given["store_params"] and dtype.itemsize == 2 and sync not in WIDE
        if not fits or given["store_param_remainders"]:
            raise RuntimeError(
                f"{NAME}: with_scaled_states=True needs store_params=True, dtype float16 or "
                "bfloat16, a param_sync_dtype narrower than float32 and no remainders, got "
                f"store_params={given['store_params']}, {dtype} and {sync}."
            )
    for name, low in (("bucket_cap_mb", 0), ("pipeline_size", 1)):
        if not given[name] >= low:
            raise ValueError(f"{NAME}: {name} must be >= {low}, got {given[name]}.")
    module = given["module"]
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"{NAME}: module must be a torch.nn.Module, got {type(module).__name__}.")


def check_state(state_dict: Any, where: str) -> None:
    """Raise ValueError unless it is a dict with a state and groups of parameters."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        keys = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else state_dict
        raise ValueError(
            f"{where}: the state must be a dict with 'state' and 'param_groups', as "
            f"state_dict() returns, got {keys!r}."
        )
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping) or not isinstance(groups, Sequence):
        raise ValueError(
            f"{where}: 'state' must be a dict and 'param_groups' a list, got a "
            f"{type(state).__name__} and a {type(groups).__name__}."
        )
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), Sequence):
            raise ValueError(
                f"{where}: each of 'param_groups' must be a dict with a list 'params', got "
                f"{group!r}."
            )


def count_of(value: Any, where: str) -> int:
    """A count of steps that a state holds as a number or as a tensor of one.

    Raises:
        ValueError: it is none, negative, or beyond int32.
    """
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    is_whole = isinstance(number, Real) and number == number and abs(number) < 2**31
    if not is_whole or number != int(number) or number < 0:
        raise ValueError(f"{where}: step must be >= 0, whole and below 2**31, got {value!r}.")
    return int(number)


def refuse_copies(optimizer: Any) -> None:
    """What copy and pickle call: process groups, hooks and messages under way stay where they are.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        f"{NAME}: an optimizer cannot be copied or pickled. Build another one, and give it "
        "state_dict()."
    )


def check_nccl_ub(given: dict[str, Any], device: torch.device) -> None:
    """Raise RuntimeError where gradient buffers cannot be taken from NCCL's memory."""
    if not given["nccl_ub"]:
        return
    if not given["contiguous_grad_buffer"]:
        raise RuntimeError(f"{NAME}: nccl_ub=True needs contiguous_grad_buffer=True.")
    if device.type != "cuda":
        raise RuntimeError(
            f"{NAME}: nccl_ub=True needs parameters on a GPU, whose buffers NCCL can register; "
            f"got {device}. Leave it out."
        )
    from ...nccl_allocator.nccl_allocator import backend  # few need it

    group = given["distributed_process_group"] or given["process_group"]
    backend(f"{NAME} with nccl_ub=True", group, device)


def check_group(
    group: dict[str, Any], owner: str = NAME, names: Sequence[str] = ("lr", "eps", "weight_decay")
) -> None:
    """Raise ValueError for one of ``betas`` and ``names`` that is out of range."""
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(map(_is_decay, betas)):
        raise ValueError(f"{owner}: betas must be two numbers in [0, 1), got {betas!r}.")
    for name in names:
        value = group[name]
        if isinstance(value, Tensor):
            is_right = value.numel() == 1 and (name == "lr" or value >= 0)
        else:
            is_right = isinstance(value, Real) and value >= 0
        if not is_right:
            raise ValueError(f"{owner}: {name} must be >= 0, got {value!r}.")


def _is_decay(beta: Any) -> bool:
    is_number = beta.numel() == 1 if isinstance(beta, Tensor) else isinstance(beta, Real)
    return is_number and bool(0 <= beta < 1)


def device_of(params: Iterable[Tensor], given: torch.device | str) -> torch.device:
    """Where the state lives: the device of the parameters, if it is the one that was given.

    ``"cuda"``, the default, stands for it.

    Raises:
        RuntimeError: the parameters lie elsewhere, or on several devices.
        TypeError: a parameter is not real floating point.
    """
    params = list(params)
    for param in params:
        if not param.is_floating_point():
            raise TypeError(f"{NAME}: params must be floating point, got {param.dtype}.")
        if param.layout != torch.strided:
            raise TypeError(f"{NAME}: params must be dense, got one of layout {param.layout}.")
    device = sole_device(params, NAME, RuntimeError)
    wanted = torch.device(given)
    is_default = wanted == torch.device("cuda")
    if not is_default and not devices_match(device, wanted):
        raise RuntimeError(f"{NAME}: device is {wanted}, but the parameters are on {device}.")
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise RuntimeError(
            f"{NAME}: the parameters are on {device}, but the current device is "
            f"cuda:{torch.cuda.current_device()}. Call torch.cuda.set_device first."
        )
    return device


def sole_device(params: Iterable[Tensor], owner: str, error: type[Exception]) -> torch.device:
    """The one device of all parameters; raises ``error`` if there is none, or more than one."""
    devices = {param.device for param in params}
    if len(devices) != 1:
        raise error(f"{owner}: params must be on one device, got {sorted(map(str, devices))}.")
    return devices.pop()


def devices_match(first: torch.device | str | None, second: torch.device | str | None) -> bool:
    """Whether two devices are the same, where no index stands for the current one."""
    one, other = (torch.device("cuda" if d is None else d) for d in (first, second))
    if one.type != other.type:
        return False
    if one.type == "cpu" or one.index == other.index:
        return True
    current = torch.get_device_module(one).current_device()
    return (one.index if one.index is not None else current) == (
        other.index if other.index is not None else current
    )
