"""Apex's extension module of FastLayerNorm: its positional signatures over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib.layer_norm.fast_layer_norm import ops as _ops

library.require_for_import(__name__, "fast_layer_norm")

__all__ = ["ln_bwd", "ln_fwd"]


@torch.no_grad()
def ln_fwd(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> list[Tensor]:
    """Return the output in the dtype of ``gamma``, mean and reciprocal standard deviation.

    ``x`` is ``[rows, H]``, ``gamma`` and ``beta`` are ``[H]``, of one dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or ``epsilon`` is negative.
    """
    dtype = torch.promote_types(x.dtype, gamma.dtype)
    operands = (t.to(dtype).contiguous() for t in (x, gamma, beta))
    y, mean, rstd = _ops.fast_layer_norm_forward(*operands, epsilon)
    return [y.to(gamma.dtype), mean, rstd]


@torch.no_grad()
def ln_bwd(dz: Tensor, saved: Tensor, *rest: Tensor | bool | None) -> list[Tensor]:
    """Return gradients of ``x``, ``gamma`` and ``beta``, and of the latter two again, ``[1, H]``.

    Args:
        dz: gradient of the output, ``[rows, H]``.
        saved: the input, or with ``memory_efficient`` the output.
        rest: ``mu, rsigma, gamma``, as ROCm's Apex has it; or ``mu, rsigma, gamma, beta,
            memory_efficient``, as NVIDIA's. ``mu`` may be None with ``memory_efficient``.

    Raises:
        TypeError: another number of arguments.
        RuntimeError: shapes, dtypes or devices do not fit.
    """
    if len(rest) not in (3, 5):
        raise TypeError(f"ln_bwd: expected 5 or 7 arguments, got {2 + len(rest)}.")
    mean, rstd, gamma, beta, memory_efficient = (*rest, None, False)[:5]
    dtype = torch.promote_types(saved.dtype, gamma.dtype)
    wide = lambda tensor: tensor.to(dtype).contiguous()
    if memory_efficient:
        given = (wide(dz), wide(saved), wide(gamma), wide(beta), rstd)
        gradients = _ops.fast_layer_norm_backward_from_output(*given, 0.0, True)
    else:
        given = (wide(dz), wide(saved), wide(gamma), mean, rstd)
        gradients = _ops.fast_layer_norm_backward(*given, True)
    dx, dgamma, dbeta = gradients
    of_weights = [g.to(gamma.dtype) for g in (dgamma, dbeta)]
    return [dx.to(saved.dtype), *of_weights, *(g[None] for g in of_weights)]
