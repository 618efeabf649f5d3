"""The functions of Apex's compiled module ``syncbn``, under their old positional signatures.

New code uses :class:`apex.parallel.SyncBatchNorm`. Names with ``_c_last`` take tensors ``[*, C]``,
the others ``[N, C, *]``. ``weight`` and ``shift`` are ``[C]`` or None. Statistics are vectors
``[C]`` in float32, or float64 for float64 input. Importing this fails where no kernel can run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.parallel import syncbn as _ops
from apex.parallel._ops import library as _library
from apex.parallel.syncbn.arrange import affine_vectors as _affine_vectors

_device_type = "cuda" if torch.cuda.is_available() else "cpu"
_library.require_for_import(__name__, "syncbn", device_type=_device_type)

__all__ = [
    "batchnorm_backward",
    "batchnorm_backward_c_last",
    "batchnorm_forward",
    "batchnorm_forward_c_last",
    "reduce_bn",
    "reduce_bn_c_last",
    "relu_bw_c_last",
    "welford_mean_var",
    "welford_mean_var_c_last",
    "welford_parallel",
]


def welford_mean_var(input: Tensor) -> list[Tensor]:
    """``[mean, biased_var]`` of each channel."""
    return list(_ops.welford_mean_var(input.contiguous(), False))


def welford_mean_var_c_last(input: Tensor) -> list[Tensor]:
    """``[mean, biased_var]`` of each channel."""
    return list(_ops.welford_mean_var(input.contiguous(), True))


def welford_parallel(mean: Tensor, biased_var: Tensor, numel: Tensor, eps: float) -> list[Tensor]:
    """``[mean, unbiased_var, inv_std]`` from those of W parts.

    Args:
        mean, biased_var: ``[W, C]``.
        numel: ``[W]`` int32, elements per channel of each part.
    """
    count = _counts("numel", numel)
    return list(_ops.welford_parallel(mean.contiguous(), biased_var.contiguous(), count, eps))


def batchnorm_forward(
    input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None, shift: Tensor | None
) -> Tensor:
    """``(input - mean) * inv_std * weight + shift``."""
    return _forward(input, None, mean, inv_std, weight, shift, False, False)


def batchnorm_forward_c_last(
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
    fuse_relu: bool,
) -> Tensor:
    """``(input - mean) * inv_std * weight + shift + z``, with ``fuse_relu`` its positive part."""
    return _forward(input, z, mean, inv_std, weight, shift, True, fuse_relu)


def reduce_bn(
    grad_output: Tensor, input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None
) -> list[Tensor]:
    """``[sum_dy, sum_dy_xmu, grad_weight, grad_bias]``; the last two are empty without weight."""
    return _reduce(grad_output, input, mean, inv_std, weight, False)


def reduce_bn_c_last(
    grad_output: Tensor, input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None
) -> list[Tensor]:
    """``[sum_dy, sum_dy_xmu, grad_weight, grad_bias]``; the last two are empty without weight."""
    return _reduce(grad_output, input, mean, inv_std, weight, True)


def batchnorm_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Gradient of the input; ``count`` is int32 ``[W]``, elements per channel of each rank."""
    return _backward(
        grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, channel_last=False
    )


def batchnorm_backward_c_last(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Gradient of the input; ``count`` is int32 ``[W]``, elements per channel of each rank."""
    return _backward(
        grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, channel_last=True
    )


def relu_bw_c_last(
    grad_output: Tensor,
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    weight: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    """``grad_output``, and 0 where the forward's ReLU has cut off a value."""
    weight, shift = _affine_vectors(input, mean.numel(), weight, shift)
    z = None if z is None else z.contiguous()
    return _ops.relu_bw(
        grad_output.contiguous(), input.contiguous(), z, mean, inv_std, weight, shift, True
    )


def _forward(input, z, mean, inv_std, weight, shift, channel_last, fuse_relu):
    weight, shift = _affine_vectors(input, mean.numel(), weight, shift)
    z = None if z is None else z.contiguous()
    return _ops.batchnorm_forward(
        input.contiguous(), z, mean, inv_std, weight, shift, channel_last, fuse_relu
    )


def _reduce(grad_output, input, mean, inv_std, weight, channel_last):
    sum_dy, sum_dy_xmu, grad_weight = _ops.reduce_bn(
        grad_output.contiguous(), input.contiguous(), mean, inv_std, channel_last
    )
    if weight is None:
        return [sum_dy, sum_dy_xmu, sum_dy.new_empty(0), sum_dy.new_empty(0)]
    return [sum_dy, sum_dy_xmu, grad_weight.to(weight.dtype), sum_dy.to(weight.dtype)]


def _backward(
    grad_output, input, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, *, channel_last
):
    weight, _ = _affine_vectors(input, mean.numel(), weight, None)
    total = _counts("count", count).sum().view(1)
    return _ops.batchnorm_backward(
        grad_output.contiguous(),
        input.contiguous(),
        mean,
        inv_std,
        weight,
        sum_dy,
        sum_dy_xmu,
        total,
        channel_last,
    )


def _counts(name: str, counts: Tensor) -> Tensor:
    if counts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"syncbn: {name} must be an int32 tensor, got {counts.dtype}.")
    return counts.to(torch.int64).contiguous()
