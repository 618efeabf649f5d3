"""Float32 copies of parameters as lists or as one flat tensor, for loops written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Masters = list[nn.Parameter] | list[Tensor]


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[nn.Parameter], Masters]:
    """The model's trainable parameters, and float32 copies to give to an optimizer.

    Args:
        model: any module; parameters of any floating-point dtype, any device.
        flat_master: make one copy of all parameters, flattened one after another; its ``.grad`` is
            allocated, as zeros. Updates then take one launch. Optimizers such as LARS, which need
            the norm of each parameter, give wrong results.

    Returns:
        ``(model_params, master_params)``; with ``flat_master`` the second has one element.

    Raises:
        TypeError: ``flat_master``, and parameters differ in dtype or device.
    """
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return model_params, [_float32_leaf(param) for param in model_params]
    kinds = {(param.dtype, param.device) for param in model_params}
    if len(kinds) > 1:
        names = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise TypeError(
            f"prep_param_lists: flat_master=True needs parameters of one dtype and device, got "
            f"{names}. A model with float32 batch norms in float16 layers needs flat_master=False."
        )
    with torch.no_grad():
        master = nn.Parameter(_flattened(model_params).float())
    master.grad = torch.zeros_like(master)
    return model_params, [master]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy gradients to the masters, in their dtype.

    Args:
        model_params, master_params: as :func:`prep_param_lists` returns them.
        flat_master: likewise. With it, a parameter without gradient contributes zeros; without it,
            the master of such a parameter has no gradient either.

    Raises:
        ValueError: the lists differ in length.
    """
    _check_lists("model_grads_to_master_grads", model_params, master_params, flat_master)
    with torch.no_grad():
        if flat_master:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
            _set_grad(master_params[0], _flattened(grads))
            return
        for model, master in zip(model_params, master_params, strict=True):
            _set_grad(master, model.grad)


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters into the model's parameters, rounded to their dtype.

    Args:
        model_params, master_params, flat_master: as :func:`prep_param_lists` returns them.

    Raises:
        ValueError: the lists differ in length.
    """
    _check_lists("master_params_to_model_params", model_params, master_params, flat_master)
    with torch.no_grad():
        if flat_master:
            pieces = master_params[0].split([param.numel() for param in model_params])
        else:
            pieces = master_params
        for model, master in zip(model_params, pieces, strict=True):
            model.copy_(master.view_as(model) if flat_master else master)


def _check_lists(
    name: str, model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat: bool
) -> None:
    expected = 1 if flat else len(model_params)
    if len(master_params) != expected:
        raise ValueError(
            f"{name}: expected {expected} master_params for {len(model_params)} model_params with "
            f"flat_master={flat}, got {len(master_params)}. Pass the lists and the flat_master of "
            "prep_param_lists."
        )
    sizes = sum(p.numel() for p in model_params), sum(p.numel() for p in master_params)
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{name}: model_params have {sizes[0]} elements, master_params {sizes[1]}."
        )


def _float32_leaf(param: Tensor) -> Tensor:
    return param.detach().to(torch.float32, copy=True).requires_grad_()


def _flattened(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _set_grad(master: Tensor, grad: Tensor | None) -> None:
    if grad is None:
        master.grad = None
        return
    if master.grad is None:
        master.grad = torch.empty_like(master)
    master.grad.copy_(grad)
