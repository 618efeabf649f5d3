"""How the functional forms run an autograd function: fused, over shards, or in plain PyTorch."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._shared.native.transforms import kernels_serve


def run(function: type[Function], *arguments: Any) -> Tensor:
    """Apply ``function`` in the way that serves these arguments; DTensors shard by shard."""
    if type(arguments[0]) is not Tensor and is_dtensor(arguments[0]):
        from .sharded import run_on_shards

        return run_on_shards(function, *arguments)
    return run_locally(function, *arguments)


def run_locally(function: type[Function], *arguments: Any) -> Any:
    """Apply ``function``; call its forward where there are no gradients, in half the time; or,
    where kernels do not serve, compute the formula in plain PyTorch.
    """
    if not kernels_serve():
        return function.plain(*arguments)
    if not torch.is_grad_enabled() or not any(map(_requires_grad, arguments)):
        return function.forward(None, *arguments)
    return function.apply(*arguments)


def _requires_grad(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor; imports nothing, since where there is one it is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
