"""BatchNorm2d_NHWC, Apex's batch norm for ResNets: ReLU and residual in the same pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from .._shared.native.named_functions import NamedFunction
from ..group_batch_norm.over_group import group_batch_norm, group_of, momentum_now

__all__ = [
    "IS_ROCM_PYTORCH",
    "BatchNorm2d_NHWC",
    "bn_NHWC_impl",
    "bn_addrelu_NHWC_impl",
    "check_and_convert_channels_last",
    "check_if_rocm_pytorch",
]

NAME = "BatchNorm2d_NHWC"


def check_if_rocm_pytorch() -> bool:
    """Whether torch is built for AMD GPUs."""
    return torch.version.hip is not None


IS_ROCM_PYTORCH = check_if_rocm_pytorch()
"""The same, as it was at import."""


def check_and_convert_channels_last(tensor: Tensor, torch_channels_last: bool) -> Tensor:
    """``tensor`` ``[N, C, H, W]`` in the channels_last memory format, where that is asked for."""
    if not torch_channels_last:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


class BatchNorm2d_NHWC(_BatchNorm):
    r"""Batch normalization of ``[N, H, W, C]``, with ReLU and residual, over groups of ranks.

    .. math:: y = \mathrm{relu}\left(\frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \gamma + \beta + z
              \right)

    :math:`\mu, \sigma^2` are mean and biased variance of a channel over the batches of ``bn_group``
    consecutive ranks, as if they were one batch. In eval mode the running statistics are used.

    Args:
        num_features: number of channels C.
        fuse_relu: apply a ReLU; needed for a residual.
        bn_group: how many consecutive ranks share statistics; divides the number of ranks. All
            ranks must make their modules in the same order. 1: no communication.
        torch_channels_last: x is ``[N, C, H, W]`` in torch's channels_last memory format (another
            is converted), and not ``[N, H, W, C]``. ROCm's argument; where NVIDIA's order of
            arguments is used, an int stands in its place, and is ``max_cta_per_sm``.
        max_cta_per_sm, cta_launch_margin, multi_stream: how Apex launches kernels; not used.

    Attributes:
        weight, bias, running_mean, running_var, num_batches_tracked: as those of
            :class:`torch.nn.BatchNorm2d`, whose ``state_dict`` it has.
        eps, momentum: 1e-5 and 0.1.
        minibatch_mean, minibatch_riv: ``[C]``, mean and ``1 / sqrt(var + eps)`` of the last batch
            in training, of all ranks of the group; float32, or float64 for such input. They are no
            buffers.

    Raises:
        ValueError: ``bn_group`` does not divide the number of ranks; there is a residual without
            ``fuse_relu``; a shape does not fit; or a channel has a single value in training.
        TypeError: a dtype does not fit.
        RuntimeError: ``bn_group`` is not 1, and ``torch.distributed`` is not initialized.

    Note:
        Gradients of weight and bias are this rank's, for DistributedDataParallel to average.

    Source:
        Ioffe & Szegedy, *Batch Normalization*, 2015; Apex's class has the same arguments.

    Example:
        >>> norm = BatchNorm2d_NHWC(64, fuse_relu=True)
        >>> x, residual = torch.randn(2, 8, 8, 64), torch.randn(2, 8, 8, 64)
        >>> norm(x, residual).shape
        torch.Size([2, 8, 8, 64])
    """

    def __init__(
        self,
        num_features: int,
        fuse_relu: bool = False,
        bn_group: int = 1,
        torch_channels_last: bool = False,
        max_cta_per_sm: int = 2,
        cta_launch_margin: int = 12,
        multi_stream: bool = False,
    ) -> None:
        super().__init__(num_features)
        group_of(f"{NAME}: bn_group", bn_group)
        self.fuse_relu, self.bn_group = fuse_relu, bn_group
        self.torch_channels_last = torch_channels_last is True
        self.multi_stream = multi_stream
        self.minibatch_mean = torch.zeros(num_features)
        self.minibatch_riv = torch.zeros(num_features)

    def extra_repr(self) -> str:
        """The arguments, as print shows them."""
        return f"{super().extra_repr()}, relu={self.fuse_relu}, bn_group={self.bn_group}"

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize ``x``, add the residual ``z`` of its shape, and take the positive part."""
        if z is not None and not self.fuse_relu:
            raise ValueError(f"{NAME}: a residual z is added before a ReLU; pass fuse_relu=True.")
        if x.dim() != 4:
            raise ValueError(f"{NAME}: x must have 4 dimensions, got {list(x.shape)}.")
        rows = [x, z]
        if self.torch_channels_last:
            rows = [t if t is None else t.movedim(1, -1) for t in rows]
        parameters, buffers = self._parameters, self._buffers
        try:  # attributes of modules take a while to look up
            vectors = parameters["weight"], parameters["bias"]
            running = buffers["running_mean"], buffers["running_var"]
            batches = buffers["num_batches_tracked"]
        except KeyError:  # parametrized
            vectors, running = (self.weight, self.bias), (self.running_mean, self.running_var)
            batches = self.num_batches_tracked
        momentum, is_training, group = self.momentum, self.training, None
        if momentum is None:
            momentum = momentum_now(momentum, batches)
        if is_training and self.bn_group != 1:
            group = group_of(f"{NAME}: bn_group", self.bn_group)
        given = *rows, *vectors, *running, self.eps, momentum, is_training, self.fuse_relu, group
        y, mean, riv = group_batch_norm(NAME, *given, batches)
        if is_training:
            vars(self).update(minibatch_mean=mean, minibatch_riv=riv)
        return y.permute(0, 3, 1, 2) if self.torch_channels_last else y


_STATISTICS = ("rm", "riv", "mini_m", "mini_riv")


class bn_NHWC_impl(NamedFunction, constants=_STATISTICS):
    """Apex's function of batch norm with or without ReLU.

    ``rm`` and ``riv`` are running mean and variance, which training updates; ``mini_m`` and
    ``mini_riv`` get the batch's. What tells Apex how to launch kernels and where other processes
    have their memory, ``ret_cta`` and all after ``bn_group``, is not used: processes exchange
    statistics through ``torch.distributed``.
    """

    @staticmethod
    def apply(
        x: Tensor,
        s: Tensor,
        b: Tensor,
        rm: Tensor,
        riv: Tensor,
        mini_m: Tensor,
        mini_riv: Tensor,
        ret_cta: Any,
        mom: float,
        epsilon: float,
        fuse_relu: bool,
        is_train: bool,
        bn_group: int,
        *launch: Any,
    ) -> Tensor:
        given = x, None, s, b, rm, riv, mini_m, mini_riv, mom, epsilon, fuse_relu, is_train
        return _of_apex(*given, bn_group)


class bn_addrelu_NHWC_impl(NamedFunction, constants=_STATISTICS):
    """Apex's function of batch norm with residual and ReLU; see :class:`bn_NHWC_impl`."""

    @staticmethod
    def apply(
        x: Tensor,
        z: Tensor,
        s: Tensor,
        b: Tensor,
        rm: Tensor,
        riv: Tensor,
        mini_m: Tensor,
        mini_riv: Tensor,
        grid_dim_y: Any,
        ret_cta: Any,
        mom: float,
        epsilon: float,
        is_train: bool,
        bn_group: int,
        *launch: Any,
    ) -> Tensor:
        given = x, z, s, b, rm, riv, mini_m, mini_riv, mom, epsilon, True, is_train
        return _of_apex(*given, bn_group)


def _of_apex(
    x: Tensor,
    z: Tensor | None,
    s: Tensor,
    b: Tensor,
    rm: Tensor,
    riv: Tensor,
    mini_m: Tensor,
    mini_riv: Tensor,
    mom: float,
    epsilon: float,
    fuse_relu: bool,
    is_train: bool,
    bn_group: int,
) -> Tensor:
    name = "bn_NHWC_impl" if z is None else "bn_addrelu_NHWC_impl"
    group = group_of(f"{name}: bn_group", bn_group) if is_train else None
    given = x, z, s, b, rm, riv, epsilon, mom, is_train, fuse_relu, group
    y, mean, inv_std = group_batch_norm(name, *given)
    if is_train:
        mini_m.copy_(mean)
        mini_riv.copy_(inv_std)
    return y
