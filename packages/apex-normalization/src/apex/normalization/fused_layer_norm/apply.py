"""How the functional forms run an autograd function: fused, over shards, or in plain PyTorch."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad


def run(function: type[Function], *arguments: Any) -> Tensor:
    """Apply ``function``; without gradients call its forward, which takes half as long.

    DTensors are normalized shard by shard. Under the transforms of ``torch.func``, which refuse
    functions that save what they do not return, and where :func:`needs_plain` says so, the formula
    runs in plain PyTorch.
    """
    if type(arguments[0]) is not Tensor and is_dtensor(arguments[0]):
        from .sharded import run_on_shards

        return run_on_shards(function, *arguments)
    if needs_plain():
        return function.plain(*arguments)
    if not torch.is_grad_enabled():
        return function.forward(None, *arguments)
    try:
        return function.apply(*arguments)
    except RuntimeError as error:
        if "setup_context" not in str(error):
            raise
    return function.plain(*arguments)


def needs_plain() -> bool:
    """Whether our operators cannot serve this call: it is traced for a runtime that has none of
    them, or differentiated in forward mode, for which they have no formula.

    The latter would give tangents of zero where gradients are off, without a word.
    """
    if forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None:
        return True  # torch.func.jvp, jacfwd, dual_level; torch.jit.trace, the old ONNX exporter
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()  # dynamo=True


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor; imports nothing, since where there is one it is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
