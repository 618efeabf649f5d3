"""Casts of whole networks to a lower dtype, with affine batch norms left in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def is_affine_batch_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a batch norm with weight and bias, synchronized ones included."""
    return isinstance(module, _BatchNorm) and module.affine


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the module's own floating-point parameters, their gradients and its buffers, in place.

    Args:
        module: its submodules are left as they are.
        dtype: floating point.
    """
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            grad, param.grad = param.grad, None
            param.data = param.data.to(dtype)
            param.grad = None if grad is None else grad.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast everything in ``network`` except affine batch norms, in place.

    Args:
        network: any module.
        dtype: floating point, such as ``torch.float16``.

    Returns:
        ``network``.
    """
    for module in network.modules():
        if is_affine_batch_norm(module):
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def convert_sharded_network(model: nn.Module, dtype: torch.dtype) -> None:
    """As :func:`convert_network`, through the one method by which FSDP2 notices."""
    norms = [m for m in model.modules() if is_affine_batch_norm(m)]
    kept = {id(t) for norm in norms for t in (*norm.parameters(), *norm.buffers())}
    kept |= {id(p.grad) for norm in norms for p in norm.parameters() if p.grad is not None}

    def cast(tensor: Tensor) -> Tensor:
        is_left = id(tensor) in kept or not tensor.is_floating_point()
        return tensor if is_left else tensor.to(dtype)

    model._apply(cast)
