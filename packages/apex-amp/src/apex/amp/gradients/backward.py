"""What happens to gradients before and after a backward pass, for each kind of optimizer.

Before: gradients of earlier passes are put aside ("stashed"), so that the new ones arrive alone,
scaled. After: the new ones are unscaled and tested, and the stashed ones are added.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..masters.sharding import is_sharded
from ..scaler import LossScaler

_GRAD, _LAYOUT = operator.attrgetter("grad"), operator.attrgetter("layout")
Scales = tuple[float, float, float]  # of the new gradients, of the stashed ones, of the result


def stash_grads(params: Sequence[Tensor], stash: list[Tensor | None]) -> None:
    """Move each ``.grad`` to its place in ``stash``."""
    for i, param in enumerate(params):
        grad = param.grad
        if grad is None:  # the usual case, after zero_grad
            stash[i] = None
        else:
            stash[i], param.grad = _own_memory(grad), None


def restore_grads(params: Sequence[Tensor], stash: list[Tensor | None]) -> None:
    """Undo :func:`stash_grads`; what a backward pass has written since is dropped."""
    for i, param in enumerate(params):
        param.grad, stash[i] = stash[i], None


def _own_memory(grad: Tensor) -> Tensor:
    """``grad``, copied if it is a piece of a communication bucket, which is about to be reused."""
    if grad.layout is not torch.strided or is_sharded(grad):
        return grad  # FSDP2 does not use the buffer again
    if grad.untyped_storage().nbytes() > grad.numel() * grad.element_size():
        return grad.clone()
    return grad


def unscale_to_masters(
    scaler: LossScaler, model_params: Sequence[Tensor], masters: Sequence[Tensor]
) -> None:
    """``master.grad += model.grad / scale`` for each pair whose model gradient is there.

    A sparse gradient stays sparse, unless it is added to a dense one.
    """
    grads = _dense_grads(model_params)
    if len(grads) == len(masters) and set(map(_GRAD, masters)) == {None}:
        master_grads = [torch.empty_like(g, dtype=torch.float32) for g in grads]
        for master, master_grad in zip(masters, master_grads, strict=True):
            master.grad = master_grad
        scaler.unscale(grads, master_grads, scaler.loss_scale(), models_are_masters=False)
        return
    new: tuple[list[Tensor], list[Tensor]] = [], []
    accumulated: tuple[list[Tensor], list[Tensor]] = [], []
    for param, master in zip(model_params, masters, strict=True):
        grad, master_grad = param.grad, master.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            # Widened first: the sum of duplicate entries is not rounded to 16 bits.
            wide, scales = grad.to(master.dtype), (scaler.loss_scale(), 1.0, 1.0)
            master.grad = _unscale_sparse(scaler, wide, master_grad, scales)
            continue
        if master_grad is not None and master_grad.layout is not torch.strided:
            master_grad = master.grad = master_grad.to_dense()
        grads, master_grads = accumulated
        if master_grad is None:
            grads, master_grads = new
            master_grad = master.grad = torch.empty_like(grad, dtype=master.dtype)
        grads.append(grad)
        master_grads.append(master_grad)
    if new[0]:
        scaler.unscale(*new, scaler.loss_scale(), models_are_masters=False)
    if accumulated[0]:
        scaler.unscale_with_stashed(*accumulated, accumulated[1])


def post_backward_models_are_masters(
    scaler: LossScaler,
    params: Sequence[Tensor],
    stashed_grads: list[Tensor | None],
    scale_override: Scales | None = None,
) -> None:
    """Unscale ``.grad`` of ``params`` in place and add ``stashed_grads``, which are cleared.

    Args:
        scaler: gives the scale, and notes an inf or NaN among the new gradients.
        params: parameters, some of which have a gradient.
        stashed_grads: one entry per parameter; None where there is none.
        scale_override: scales of the new gradients, the stashed ones and the result; default: the
            current loss scale, 1 and 1.
    """
    if not params:
        return
    # The usual case: no gradient was stashed, and none is sparse.
    if {None}.issuperset(stashed_grads) and (alone := _dense_grads(params)):
        _unscale_alone(scaler, alone, scale_override)
        return
    scales = scale_override or (scaler.loss_scale(), 1.0, 1.0)
    alone, new, stashed = [], [], []
    for i, param in enumerate(params):
        grad, stash = param.grad, stashed_grads[i]
        stashed_grads[i] = None
        if grad is None:
            param.grad = _rescaled(stash, scales)
        elif grad.layout is not torch.strided:
            param.grad = _unscale_sparse(scaler, grad, stash, scales)
        elif stash is None:
            alone.append(grad)
        else:
            new.append(grad)
            stashed.append(stash if stash.layout is torch.strided else stash.to_dense())
            param.grad = stashed[-1]
    if alone:
        _unscale_alone(scaler, alone, scale_override)
    if new:
        scaler.unscale_with_stashed(new, stashed, stashed, scales)


def _dense_grads(params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that are there, or an empty list if one of them is sparse."""
    grads = list(map(_GRAD, params))
    if type(None) in map(type, grads):
        grads = [grad for grad in grads if grad is not None]
    return grads if set(map(_LAYOUT, grads)) == {torch.strided} else []


def _unscale_alone(scaler: LossScaler, grads: list[Tensor], scale_override: Scales | None) -> None:
    override = None if scale_override is None else scale_override[0] / scale_override[2]
    scaler.unscale(grads, grads, models_are_masters=True, scale_override=override)


def _rescaled(stash: Tensor | None, scales: Scales) -> Tensor | None:
    _, stash_scale, out_scale = scales
    return stash if stash is None or stash_scale == out_scale else stash * (out_scale / stash_scale)


def _unscale_sparse(
    scaler: LossScaler, grad: Tensor, stash: Tensor | None, scales: Scales
) -> Tensor:
    """The same for one sparse gradient; the sum of duplicate entries is what may overflow."""
    grads_scale, _, out_scale = scales
    grad = grad.coalesce()
    values = [grad.values()]
    scaler.unscale(values, values, models_are_masters=True, scale_override=grads_scale / out_scale)
    return grad if stash is None else _rescaled(stash, scales) + grad


def prepare_backward_with_master_weights(self: Any) -> None:
    """Clear the model's 16-bit gradients (masters hold the sum), stash those of float32 ones."""
    stash = self._amp_stash
    for param in stash.all_fp16_params:
        param.grad = None  # autograd then hands its result over instead of adding to it
    stash_grads(stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash)


def post_backward_with_master_weights(self: Any, scaler: LossScaler) -> None:
    """Unscale to the masters' gradients, and float32 parameters' gradients in place."""
    stash = self._amp_stash
    unscale_to_masters(scaler, stash.all_fp16_params, stash.all_fp32_from_fp16_params)
    post_backward_models_are_masters(
        scaler, stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash
    )


def prepare_backward_no_master_weights(self: Any) -> None:
    """Stash all gradients."""
    stash = self._amp_stash
    if stash.all_fp16_params:  # none at O1
        stash_grads(stash.all_fp16_params, stash.all_fp16_grad_stash)
    stash_grads(stash.all_fp32_params, stash.all_fp32_grad_stash)


def post_backward_no_master_weights(self: Any, scaler: LossScaler) -> None:
    """Unscale all gradients in place."""
    stash = self._amp_stash
    if stash.all_fp16_params:
        post_backward_models_are_masters(scaler, stash.all_fp16_params, stash.all_fp16_grad_stash)
    post_backward_models_are_masters(scaler, stash.all_fp32_params, stash.all_fp32_grad_stash)


def prepare_backward_with_master_weights_FusedSGD(self: Any) -> None:
    """As for other optimizers, or stash all gradients if the optimizer reads the 16-bit ones."""
    if self.materialize_master_grads:
        prepare_backward_with_master_weights(self)
        return
    stash = self._amp_stash
    stash_grads(stash.all_fp16_params, stash.all_fp16_grad_stash)
    stash_grads(stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash)


def post_backward_with_master_weights_FusedSGD(self: Any, scaler: LossScaler) -> None:
    """As for other optimizers, or leave gradients scaled for the optimizer to unscale.

    The optimizer divides by ``most_recent_scale``: gradients of several passes are brought to the
    smallest of their scales, which cannot overflow.
    """
    if self.materialize_master_grads:
        post_backward_with_master_weights(self, scaler)
        return
    stash = self._amp_stash
    scale = scaler.loss_scale()
    out_scale = min(scale, self.most_recent_scale) if self.scale_set_by_backward else scale
    scales = (scale, self.most_recent_scale, out_scale)
    post_backward_models_are_masters(
        scaler, stash.all_fp16_params, stash.all_fp16_grad_stash, scales
    )
    post_backward_models_are_masters(
        scaler, stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash, scales
    )
    self.most_recent_scale = out_scale
    self.scale_set_by_backward = True


# Without masters FusedSGD is like any other optimizer.
prepare_backward_no_master_weights_FusedSGD = prepare_backward_no_master_weights
post_backward_no_master_weights_FusedSGD = post_backward_no_master_weights
