"""Checks of DistributedFusedLAMB's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._shared.native.errors import check_is_no_module
from ..distributed.arguments import check_group as in_range
from ..distributed.arguments import count_of
from ..distributed.collectives import odd_ranks

NAME = "DistributedFusedLAMB"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_options(given: dict[str, Any], params: Any) -> None:
    """Raise for a module, a count out of range, and options that exclude each other."""
    check_is_no_module(NAME, params)
    lowest = {
        **dict.fromkeys(("dwu_num_blocks", "dwu_num_chunks", "dwu_num_rs_pg", "dwu_num_ar_pg"), 1),
        **dict.fromkeys(("dwu_group_size", "dwu_num_ag_pg", "nccl_allgather_channels"), 0),
    }
    for name, low in lowest.items():
        if not isinstance(given[name], int) or given[name] < low:
            raise ValueError(f"{NAME}: {name} must be an integer >= {low}, got {given[name]!r}.")
    if given["e5m2_allgather"] and given["set_param_views_to_flat_buffer"]:
        raise ValueError(
            f"{NAME}: set_param_views_to_flat_buffer=True needs the parameters' own dtype in the "
            "buffer; pass e5m2_allgather=False, too."
        )


def check_group(group: dict[str, Any]) -> None:
    """Raise ValueError for a hyper-parameter that is out of range, TypeError for a parameter."""
    in_range(group, NAME, ("lr", "eps", "weight_decay", "max_grad_norm"))
    for param in group["params"]:
        if param.dtype not in _DTYPES or param.layout != torch.strided:
            raise TypeError(
                f"{NAME}: params must be dense and float32, float16 or bfloat16, got "
                f"{param.dtype} of layout {param.layout}."
            )


def check_alike(params: Sequence[Tensor], options: dict[str, Any]) -> None:
    """Compare shapes, dtypes and options of all ranks, by a hash.

    Raises:
        RuntimeError: on every rank, if some rank has others.
    """
    facts = [[(tuple(p.shape), p.dtype) for p in params], sorted(map(str, options.items()))]
    if odd_ranks(facts, dist.group.WORLD, params[0].device):
        raise RuntimeError(
            f"{NAME}: the parameters or options of some ranks differ from those of others. All "
            "ranks must build the same model and give the same arguments, in the same order."
        )


def checked_step(state_dict: Any, own: int) -> int:
    """The count of steps of a state, which is looked at as a whole.

    Args:
        own: elements of this rank's part.

    Raises:
        ValueError: it is not a state of this rank with this model and these options.
    """
    where = f"{NAME}.load_state_dict"
    if not isinstance(state_dict, Mapping) or "step" not in state_dict:
        got = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else state_dict
        raise ValueError(
            f"{where}: the state must be a dict with step, fp32_p, fp32_m and fp32_v, as "
            f"state_dict() returns, got {got!r}."
        )
    for name in ("fp32_p", "fp32_m", "fp32_v"):
        part = state_dict.get(name)
        if not isinstance(part, Tensor) or part.shape != (own,) or part.dtype != torch.float32:
            got = (part.dtype, list(part.shape)) if isinstance(part, Tensor) else part
            raise ValueError(
                f"{where}: {name} must have {own} elements of float32, as this rank's part has "
                f"with this model and these options, got {'nothing' if got is None else got}."
            )
    if bool((state_dict["fp32_v"] < 0).any()):
        raise ValueError(
            f"{where}: fp32_v has negative numbers, which squares' averages cannot be. The "
            "checkpoint is damaged; load an older one."
        )
    return count_of(state_dict["step"], where)


def ordered(params: Sequence[Tensor], param_order: Any) -> list[Tensor]:
    """The parameters in the order in which they are laid out.

    Raises:
        ValueError: ``param_order`` does not hold each of them once.
    """
    if param_order is None:
        return list(params)
    order = list(param_order)
    if sorted(map(id, order)) != sorted(map(id, params)):
        raise ValueError(
            f"{NAME}: param_order must hold each of the {len(params)} parameters that require a "
            f"gradient once, got {len(order)}."
        )
    return order


def buffer_dtype(params: Sequence[Tensor], needs_one: bool) -> torch.dtype:
    """What gradients and new parameters are exchanged in: the parameters' dtype, else float32.

    Raises:
        ValueError: ``needs_one``, and there are several dtypes.
    """
    dtypes = {param.dtype for param in params}
    if len(dtypes) == 1:
        return dtypes.pop()
    if needs_one:
        raise ValueError(
            f"{NAME}: set_param_views_to_flat_buffer=True needs parameters of one dtype, got "
            f"{sorted(map(str, dtypes))}."
        )
    return torch.float32


def scale_of(optimizer: Any, grad_scaler: torch.amp.GradScaler) -> Tensor:
    """What a scaler has multiplied the loss by; float32 ``[1]``.

    Raises:
        RuntimeError: it has unscaled the optimizer's gradients.
    """
    stage = grad_scaler._per_optimizer_states[id(optimizer)]["stage"]
    if stage.name == "UNSCALED":
        raise RuntimeError(
            f"{NAME}.step: grad_scaler.unscale_ was called, but reductions take scaled "
            "gradients. Leave it out; pass max_grad_norm to the optimizer to clip them."
        )
    return grad_scaler.scale(torch.ones(1, device=optimizer.global_scale.device))
