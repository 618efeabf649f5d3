"""How the functional forms run an autograd function: fused, over shards, or in plain PyTorch."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from .._shared.native.transforms import is_transformed


def run(function: type[Function], *arguments: Any) -> Tensor:
    """Apply ``function`` in the way that serves these arguments; DTensors shard by shard."""
    if type(arguments[0]) is not Tensor and is_dtensor(arguments[0]):
        from .sharded import run_on_shards

        return run_on_shards(function, *arguments)
    return run_locally(function, *arguments)


def run_locally(function: type[Function], *arguments: Any) -> Any:
    """Apply ``function``; call its forward where there are no gradients, in half the time; or,
    where :func:`needs_plain` says so, compute the formula in plain PyTorch.
    """
    if needs_plain():
        return function.plain(*arguments)
    if not torch.is_grad_enabled() or not any(map(_requires_grad, arguments)):
        return function.forward(None, *arguments)
    return function.apply(*arguments)


def needs_plain() -> bool:
    """Whether our operators cannot serve this call.

    They cannot where it is traced for a runtime that has none of them; where it is differentiated
    in forward mode, for which they have no formula; and under the transforms of ``torch.func``,
    which take no function that saves what it does not return. The latter two would in part give
    gradients of zero, without a word.
    """
    if forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None:
        return True  # torch.func.jvp, jacfwd, dual_level; torch.jit.trace, the old ONNX exporter
    is_compiling = torch.compiler.is_compiling()
    if is_transformed():
        # Without gradients vmap has rules for them; but compilers see grad mode only from outside.
        return is_compiling or torch.is_grad_enabled()
    return is_compiling and torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def _requires_grad(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor; imports nothing, since where there is one it is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
