"""Apex's extension module of MLPs: its positional signatures over this wheel's functions.

Importable only where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib._shared.native.composed import plainly as _plainly
from apex.mlp import mlp as _mlp

library.require_for_import(__name__, "dense_epilogue")

__all__ = ["backward", "forward"]


def forward(use_bias: int, activation: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run the layers; return ``[output, reserved]``.

    Args:
        use_bias, activation, inputs: the arguments of :func:`apex.mlp.mlp_function`, whose errors
            it raises; ``inputs`` are all of its tensors. Autocast does nothing.

    Returns:
        The output, and one flat tensor of all layers' outputs, which :func:`backward` takes.
    """
    output, *outputs = _mlp.run("mlp_cuda.forward", use_bias, activation, inputs)
    flat = _plainly(output, torch.cat, [layer.reshape(-1) for layer in outputs])
    return [output, flat]


def backward(
    use_bias: int,
    activation: int,
    grad_o: Tensor,
    fprop_outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of all ``inputs``, given that of the output and what :func:`forward` returned."""
    name = "mlp_cuda.backward"
    _mlp.check_operands(name, use_bias, activation, inputs)
    output, reserved = fprop_outputs
    if grad_o.shape != output.shape or grad_o.dtype != output.dtype:
        raise ValueError(
            f"{name}: grad_o must be as the output, {output.dtype} {list(output.shape)}, got "
            f"{grad_o.dtype} {list(grad_o.shape)}."
        )
    count = (len(inputs) - 1) // (2 if use_bias else 1)
    lead = inputs[0].shape[:-1]
    shapes = [(*lead, weight.shape[0]) for weight in inputs[1 : 1 + count]]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if reserved.shape != (sum(sizes),) or reserved.dtype != output.dtype:
        raise ValueError(
            f"{name}: reserved must be what forward returned, {output.dtype} [{sum(sizes)}], got "
            f"{reserved.dtype} {list(reserved.shape)}."
        )
    outputs = [part.view(shape) for part, shape in zip(reserved.split(sizes), shapes, strict=True)]
    return _mlp.gradients(use_bias, activation, grad_o, inputs, outputs)
