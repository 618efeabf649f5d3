"""Casts of whole networks to a 16-bit dtype, with the batch norms left in float32."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast every affine batch norm in ``module`` to float32, in place.

    Args:
        module: any module; synchronized batch norms count as batch norms.

    Returns:
        ``module``.
    """
    for child in module.modules():
        if _is_affine_batch_norm(child):
            child.float()
    return module


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
        if _is_affine_batch_norm(module):
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def _is_affine_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine
