"""Casts of whole networks to a 16-bit dtype, with the batch norms left in float32."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from ..amp.masters.convert import convert_module, convert_network, is_affine_batch_norm
from ._master_lists import (
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)
from .loss_scaler import to_python_float

__all__ = [
    "TORCH_MAJOR",
    "TORCH_MINOR",
    "BN_convert_float",
    "FP16Model",
    "backwards_debug_hook",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

TORCH_MAJOR, TORCH_MINOR = map(int, torch.__version__.split(".")[:2])
"""The version of torch: 2 and 13 of ``2.13.0+cpu``."""


class tofp16(nn.Module):
    """Casts its input to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input.half()``."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast every affine batch norm in ``module`` to float32, in place.

    Args:
        module: any module; synchronized batch norms count as batch norms.

    Returns:
        ``module``.
    """
    for child in module.modules():
        if is_affine_batch_norm(child):
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """A float16 network, affine batch norms excepted, behind a cast of its input.

    Args:
        network: cast in place; takes one input.

    Returns:
        ``Sequential(tofp16(), network)``.
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


class FP16Model(nn.Module):
    """A float16 network, affine batch norms excepted, that casts its inputs.

    Args:
        network: cast in place.

    Attributes:
        network: the same.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.float16)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The network's output for ``inputs`` in float16."""
        return self.network(*(value.half() for value in inputs))


def backwards_debug_hook(grad: torch.Tensor) -> NoReturn:
    """A hook for tensors that should receive no gradient.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"a gradient of shape {list(grad.shape)} and dtype {grad.dtype} reached a tensor that "
        "backwards_debug_hook was registered on; masters should not take part in a graph."
    )
