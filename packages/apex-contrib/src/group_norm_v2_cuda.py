"""Apex's second extension module of group normalization, over this wheel's ops.

Importable only where the kernels can run, because callers take the import as that answer. Tensors
are ``[N, H, W, C]``, or ``[N, C, H, W]`` that are channels-last in memory; results are like them.
``sm_margin`` asks Apex's kernels to leave multiprocessors to others; here it changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.contrib._ops import library
from apex.contrib.group_norm.custom_ops import group_norm_nhwc_bprop, group_norm_nhwc_fprop
from apex.contrib.group_norm.functional import channels_second

library.require_for_import(__name__, "group_norm_nhwc")

__all__ = ["gn", "gn_bwd"]


@torch.no_grad()
def gn(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    eps: float,
    silu: bool,
    num_groups: int,
    mean_var_out: Tensor | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Return the output, and write what :func:`gn_bwd` takes to ``mean_var_out`` ``[2 * N * G]``.

    Raises:
        TypeError: a dtype is not one of those of the kernels.
        ValueError: shapes or devices do not fit.
    """
    given, back = channels_second(x, w)
    act = "silu" if silu else None
    y, sums = group_norm_nhwc_fprop(given, num_groups, w, b, eps, act, 1, True)
    if mean_var_out is not None:
        if mean_var_out.shape != sums.shape:
            raise ValueError(
                f"gn: mean_var_out must have shape {list(sums.shape)}, got "
                f"{list(mean_var_out.shape)}."
            )
        mean_var_out.copy_(sums)
    return back(y)


@torch.no_grad()
def gn_bwd(
    grad_output: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor,
    mean_var: Tensor,
    eps: float,
    silu: bool,
    num_groups: int,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``x``, ``w`` and ``b``."""
    given, back = channels_second(x, w)
    dy, _ = channels_second(grad_output, w)
    act = "silu" if silu else None
    dx, dweight, dbias = group_norm_nhwc_bprop(
        dy, mean_var, given, num_groups, w, b, eps, act, 1, True
    )
    return back(dx), dweight, dbias
