"""What FusedSGD refuses: hyper-parameters, parameters, and states of another model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._gradients import describe
from .launches import BUFFER

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_hyper(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if lr is None:
        raise ValueError("FusedSGD: lr must be given, to the optimizer or to every group.")
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"FusedSGD: lr must have one element, got shape {list(lr.shape)}.")
    elif not lr >= 0:
        raise ValueError(f"FusedSGD: lr must be >= 0, got {lr}.")
    for name in ("momentum", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"FusedSGD: {name} must be >= 0, got {group[name]}.")
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError(
            "FusedSGD: nesterov=True needs momentum > 0 and dampening = 0, got momentum "
            f"{group['momentum']} and dampening {group['dampening']}."
        )


def check_params(params: list[Tensor]) -> None:
    for index, param in enumerate(params):
        if param.dtype not in _DTYPES:
            raise TypeError(
                f"FusedSGD: params[{index}] must be float64, float32, float16 or bfloat16, got "
                f"{describe(param)}."
            )


def check_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise before anything is loaded if the state is of another model or optimizer."""
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    sizes, saved_sizes = ([len(g["params"]) for g in gs] for gs in (groups, saved_groups))
    if sizes != saved_sizes:
        raise ValueError(
            f"FusedSGD.load_state_dict: the optimizer has groups of {sizes} parameters, but the "
            f"state has groups of {saved_sizes}."
        )
    for group, saved in zip(groups, saved_groups, strict=True):
        if saved.get("differentiable"):
            raise ValueError(
                "FusedSGD.load_state_dict: the state has differentiable=True; FusedSGD's step is "
                "not differentiable. Use torch.optim.SGD."
            )
        for param, index in zip(group["params"], saved["params"], strict=True):
            buffer = state_dict["state"].get(index, {}).get(BUFFER)
            if buffer is not None and buffer.shape != param.shape:
                raise ValueError(
                    f"FusedSGD.load_state_dict: state {BUFFER!r} has shape {list(buffer.shape)}, "
                    f"but its parameter is {describe(param)}. The checkpoint is of another model."
                )
