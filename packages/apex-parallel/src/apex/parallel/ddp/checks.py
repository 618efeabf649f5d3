"""Checks of DistributedDataParallel's arguments, and that all ranks hold the same model."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NAME = "DistributedDataParallel"


def require_process_group(owner: str) -> None:
    """Raise RuntimeError unless the default process group exists."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{owner}: no process group. Call torch.distributed.init_process_group first."
        )


def check_numbers(
    message_size: int, num_allreduce_streams: int, gradient_predivide_factor: float
) -> None:
    """Raise ValueError unless the numeric arguments are in range."""
    if not message_size > 0:
        raise ValueError(f"{NAME}: message_size must be > 0 elements, got {message_size}.")
    if int(num_allreduce_streams) != num_allreduce_streams or num_allreduce_streams < 1:
        raise ValueError(
            f"{NAME}: num_allreduce_streams must be an integer >= 1, got {num_allreduce_streams}."
        )
    if not (gradient_predivide_factor > 0 and math.isfinite(gradient_predivide_factor)):
        raise ValueError(
            f"{NAME}: gradient_predivide_factor must be finite and > 0, got "
            f"{gradient_predivide_factor}."
        )


def warn_split_factor(gradient_average_split_factor: float | None) -> None:
    """Say that the argument does nothing, as it never did."""
    if gradient_average_split_factor is not None:
        message = f"{NAME}: gradient_average_split_factor has no effect."
        warnings.warn(message, stacklevel=3)


def check_combination(
    delay_allreduce: bool,
    shared_param: Any,
    allreduce_trigger_params: Sequence[Tensor] | None,
    num_allreduce_streams: int,
) -> None:
    """Raise ValueError where one argument contradicts another."""
    if shared_param is not None:
        raise ValueError(
            f"{NAME}: shared_param is no longer supported, got {shared_param!r}. Leave it out: "
            "shared parameters need no special treatment, and delay_allreduce=True serves models "
            "whose backward order changes."
        )
    if delay_allreduce and allreduce_trigger_params is not None:
        raise ValueError(
            f"{NAME}: allreduce_trigger_params has no effect with delay_allreduce=True, which "
            "reduces everything at the end of backward. Give one of them."
        )
    if delay_allreduce and num_allreduce_streams > 1:
        raise ValueError(
            f"{NAME}: num_allreduce_streams={num_allreduce_streams} has no effect with "
            "delay_allreduce=True, which reduces everything at the end of backward. Give one of "
            "them."
        )


def check_communicators(
    communicators: tuple[Sequence[Any], Sequence[Any]] | None,
    num_allreduce_streams: int,
    device: torch.device,
) -> None:
    """Raise ValueError unless ``(process groups, streams)`` fit the number of streams."""
    if communicators is None:
        return
    if num_allreduce_streams < 2:
        raise ValueError(
            f"{NAME}: allreduce_communicators needs num_allreduce_streams > 1, got "
            f"{num_allreduce_streams}."
        )
    if len(communicators) != 2 or {len(part) for part in communicators} != {num_allreduce_streams}:
        raise ValueError(
            f"{NAME}: allreduce_communicators must be (process groups, streams), two lists of "
            f"num_allreduce_streams={num_allreduce_streams} items, got lists of "
            f"{[len(part) for part in communicators]} items."
        )
    for position, (group, stream) in enumerate(zip(*communicators, strict=True)):
        if dist.get_world_size(group) != dist.get_world_size():
            raise ValueError(
                f"{NAME}: allreduce_communicators[0][{position}] spans "
                f"{dist.get_world_size(group)} ranks; expected all {dist.get_world_size()}."
            )
        if (stream is None) != (device.type == "cpu"):
            raise ValueError(
                f"{NAME}: allreduce_communicators[1][{position}] is {stream!r}, but the parameters "
                f"are on {device}. Give None on the CPU and a stream on accelerators."
            )


def parameters_device(module: nn.Module, owner: str = NAME) -> torch.device:
    """The one device of all parameters (the CPU if there are none).

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: parameters lie on several devices, are not materialised, or lie on the CPU
            while the process group is NCCL's.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{owner}: module must be a torch.nn.Module, got {type(module).__name__}.")
    nccl_only = str(dist.get_backend()) == "nccl"
    first: tuple[str, torch.device] | None = None
    for name, param in module.named_parameters():
        if nn.parameter.is_lazy(param) or param.is_meta:
            raise ValueError(
                f"{owner}: parameter {name} of module has no values yet. Run one forward of a lazy "
                "module, or materialise a meta module, before wrapping it."
            )
        if nccl_only and param.device.type == "cpu":
            raise ValueError(
                f"{owner}: parameter {name} of module is on the CPU, and the process group is "
                "NCCL's, which reduces GPU tensors. Move the module to a GPU or use gloo."
            )
        first = first or (name, param.device)
        if param.device != first[1]:
            raise ValueError(
                f"{owner}: parameter {name} of module is on {param.device}, but {first[0]} is on "
                f"{first[1]}. All parameters must be on one device."
            )
    return first[1] if first else torch.device("cpu")


def trigger_indices(triggers: Iterable[Tensor], params: Sequence[Tensor]) -> set[int]:
    """Positions in ``params`` of the trigger parameters that require gradients."""
    ids = {id(trigger) for trigger in triggers}
    return {index for index, param in enumerate(params) if id(param) in ids}


def check_triggers(triggers: Sequence[Tensor] | None, module: nn.Module) -> None:
    """Raise ValueError unless every trigger is a parameter of ``module``."""
    ids = {id(param) for param in module.parameters()}
    for position, trigger in enumerate(triggers or ()):
        if id(trigger) not in ids:
            raise ValueError(
                f"{NAME}: allreduce_trigger_params[{position}] is not a parameter of module."
            )


def hashes_of_all_ranks(
    named_params: Iterable[tuple[str, Tensor]],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """By rank, four numbers for names, shapes and dtypes, and four for strides."""
    named = list(named_params)
    text = ";".join(f"{name}:{list(param.shape)}:{param.dtype}" for name, param in named)
    strides = ";".join(str(param.stride()) for _, param in named)
    digest = b"".join(hashlib.sha256(part.encode()).digest() for part in (text, strides))
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine, group=group)
    return [row.tolist() for row in theirs]


def check_same_on_all_ranks(hashes: Sequence[Sequence[int]], what: str, owner: str = NAME) -> bool:
    """Compare what :func:`hashes_of_all_ranks` gave, so that a mismatch cannot become a hang.

    Returns:
        Whether strides are the same on all ranks, too.

    Raises:
        RuntimeError: on every rank, naming the ranks that differ from rank 0.
    """
    different = [rank for rank, row in enumerate(hashes) if row[:4] != hashes[0][:4]]
    if different:
        raise RuntimeError(
            f"{owner}: {what} of ranks {different} differ from those of rank 0 in name, shape or "
            "dtype. Every rank must build the same model and freeze the same parameters."
        )
    return all(row == hashes[0] for row in hashes)
