"""Norms of reduced gradients, and what scalers do with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ...clip_grad.ops import clip_grad_total_norm
from .arguments import NAME
from .ownership import check_owner
from .step import joined


def local_square(
    optimizer: Any, parameters: Iterable[Tensor] | None = None, norm_type: float = 2.0
) -> Tensor:
    """The square of the 2-norm of this rank's share of gradients; it has them reduced.

    Returns:
        float64, without dimensions.

    Raises:
        RuntimeError: a parameter is not the optimizer's.
    """
    optimizer.grad_sync()
    spans: dict[int, list[tuple[int, int]]] = {}
    if parameters is None:
        fragments = [f for b in optimizer.state["buckets"] for f in b.local_fragments()]
    else:
        params = list(parameters)
        for param in params:
            optimizer.position_of(param)
        fragments = [f for p in params for f in optimizer.state[p].get("fragments", ())]
    for fragment in fragments:
        if fragment.in_local_shard:
            spans.setdefault(fragment.bucket_id, []).append(fragment.shard_range)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for bucket_id, ranges in spans.items():
        shard = optimizer.grads_buckets[bucket_id].grads_shard
        if shard is not None:
            bucket = optimizer.state["buckets"][bucket_id]
            parts = [shard[b:e] for b, e in joined(ranges, bucket)]
            by_dtype.setdefault(shard.dtype, []).extend(parts)
    total = torch.zeros((), dtype=torch.float64, device=optimizer.device)
    for parts in by_dtype.values():
        total += clip_grad_total_norm(parts, 2.0).squeeze(0).square()
    return total


@torch.no_grad()
def grad_norm(
    optimizer: Any,
    parameters: Iterable[Tensor] | None = None,
    norm_type: float = 2.0,
    force: bool = False,
) -> Tensor:
    """The 2-norm of the reduced gradients, with the pending scale; a collective call.

    Args:
        parameters: by default all, whose norm is kept until gradients change.
        norm_type: 2.
        force: compute it anew.

    Returns:
        float32, without dimensions.

    Raises:
        ValueError: another ``norm_type``.
        RuntimeError: a parameter is not this optimizer's.
    """
    check_owner(optimizer, "grad_norm")
    if norm_type != 2:
        raise ValueError(f"{NAME}.grad_norm: norm_type must be 2, got {norm_type}.")
    if parameters is not None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    known = optimizer._grad_norm if parameters is None and not force else None
    if known is None:
        square = optimizer._local_grad_norm(parameters=parameters, norm_type=2.0)
        if optimizer.distributed_size > 1:
            dist.all_reduce(square, group=optimizer.distributed_process_group)
        known = square.sqrt().float()
        if parameters is None:
            optimizer._grad_norm = known
    return known * optimizer._grad_scale


@torch.no_grad()
def clip_grad_norm(
    optimizer: Any,
    max_norm: float,
    parameters: Iterable[Tensor] | None = None,
    norm_type: float = 2.0,
) -> Tensor:
    """Have the step scale all gradients so that their norm is at most ``max_norm``.

    Returns:
        The norm before that.

    Raises:
        ValueError: ``max_norm`` is not positive, or another ``norm_type``.
    """
    if not max_norm > 0:
        raise ValueError(f"{NAME}.clip_grad_norm: max_norm must be > 0, got {max_norm}.")
    total = optimizer.grad_norm(parameters=parameters, norm_type=norm_type)
    optimizer._grad_scale *= (max_norm / (total + 1e-6)).clamp(max=1.0)
    return total


def state_of(optimizer: Any, grad_scaler: Any) -> dict[str, Any]:
    """What a torch.amp.GradScaler knows of this optimizer."""
    return grad_scaler._per_optimizer_states[id(optimizer)]


@torch.no_grad()
def unscale_grads(
    optimizer: Any, *args: Any, inv_scale: Any = None, grad_scaler: Any = None
) -> dict[torch.device, Tensor]:
    """Have the step multiply gradients by the inverse of a loss scale.

    Returns:
        By device, 1.0 if some gradient of some rank is not finite, else 0.0.

    Raises:
        ValueError: not exactly one of ``inv_scale`` and ``grad_scaler`` is given.
        RuntimeError: ``grad_scaler`` has no scale yet, or has unscaled these gradients.
    """
    if args and inv_scale is None:
        inv_scale = args[0]
    if (inv_scale is None) == (grad_scaler is None):
        raise ValueError(f"{NAME}.unscale_grads: give either inv_scale or grad_scaler.")
    if grad_scaler is not None and not grad_scaler.is_enabled():
        grad_scaler, inv_scale = None, 1.0
    if grad_scaler is not None:
        scale = grad_scaler._scale
        if scale is None:
            raise RuntimeError(
                f"{NAME}.unscale_grads: grad_scaler has no scale. Call grad_scaler.scale(loss) and "
                "backward first."
            )
        stage = state_of(optimizer, grad_scaler)["stage"]
        if stage is not OptState.READY:
            raise RuntimeError(
                f"{NAME}.unscale_grads: grad_scaler has unscaled these gradients already, or "
                f"stepped ({stage.name}). Call it once between two updates of the scaler."
            )
        inv_scale = scale.double().reciprocal().float()
    found_inf = (~torch.isfinite(optimizer.grad_norm())).float()
    if isinstance(inv_scale, Tensor):
        inv_scale = inv_scale.to(optimizer.device, torch.float32).view([])
    optimizer._grad_scale *= inv_scale
    result = {found_inf.device: found_inf}
    if grad_scaler is not None:
        state = state_of(optimizer, grad_scaler)
        state["found_inf_per_device"], state["stage"] = result, OptState.UNSCALED
    return result


def has_overflow(optimizer: Any, grad_scaler: Any) -> bool:
    """Whether the step is to be skipped; with ``capturable`` the device will know.

    Raises:
        RuntimeError: ``grad_scaler.unscale_`` was called, which finds no gradients here.
    """
    if grad_scaler is None or not grad_scaler.is_enabled():
        return False
    state = state_of(optimizer, grad_scaler)
    if state["stage"] is OptState.READY:
        optimizer.unscale_grads(grad_scaler=grad_scaler)
    elif not state["found_inf_per_device"]:
        raise RuntimeError(
            f"{NAME}.step: grad_scaler.unscale_(optimizer) finds no gradients, because they are "
            "in the optimizer's shards. Call optimizer.unscale_grads(grad_scaler=grad_scaler) "
            "instead, before clip_grad_norm."
        )
    flags = list(state_of(optimizer, grad_scaler)["found_inf_per_device"].values())
    if optimizer.capturable:
        optimizer.found_inf.copy_(sum(flag.to(optimizer.device) for flag in flags))
        return False
    return any(bool(flag) for flag in flags)
