"""GroupBatchNorm2d: batch normalization with the statistics of a group of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .._shared.native.named_functions import NamedFunction
from .._shared.native.operands import autocast, is_amp
from ..group_batch_norm.over_group import group_batch_norm, group_of, momentum_now

__all__ = ["GroupBatchNorm2d"]

NAME = "GroupBatchNorm2d"


class _GroupBatchNorm2d(
    NamedFunction,
    constants=("running_mean", "running_variance", "minibatch_mean", "minibatch_inv_var"),
):
    """Apex's function of :class:`GroupBatchNorm2d` in training.

    ``minibatch_mean`` and ``minibatch_inv_var`` get the batch's statistics. ``group_rank`` and the
    buffers, which tell Apex where other processes have their memory, are not used.
    """

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_variance: Tensor | None,
        minibatch_mean: Tensor,
        minibatch_inv_var: Tensor,
        momentum: float,
        eps: float,
        group_size: int,
        group_rank: int = 0,
        fwd_buffers: Any = None,
        bwd_buffers: Any = None,
    ) -> Tensor:
        """Normalize ``input`` ``[N, C, H, W]``."""
        y, mean, inv_std = group_batch_norm(
            NAME,
            input.permute(0, 2, 3, 1),
            None,
            *(weight, bias, running_mean, running_variance, eps, momentum, True, False),
            group_of(f"{NAME}: group_size", group_size),
        )
        minibatch_mean.copy_(mean)
        minibatch_inv_var.copy_(inv_std)
        return y.permute(0, 3, 1, 2)


class GroupBatchNorm2d(_BatchNorm):
    r"""Batch normalization over the batches of ``group_size`` consecutive ranks.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \gamma + \beta

    :math:`\mu, \sigma^2` are mean and biased variance of a channel over these batches, as if they
    were one. Running statistics take the unbiased variance, and are used in eval mode.

    Args:
        num_features: number of channels C.
        group_size: how many ranks share statistics; divides the number of ranks. All ranks must
            make their modules in the same order. 1: no communication.
        eps: added to the variance, in units of the input squared.
        momentum: share of the batch in the new running statistics; None for an average of all.
        affine: learn a weight :math:`\gamma` and a bias :math:`\beta`, ``[C]``.
        track_running_stats: keep running statistics; if False, those of the batch are used in
            eval mode as well, of this rank alone.

    Attributes:
        minibatch_mean, minibatch_inv_var: ``[C]``, mean and ``1 / sqrt(var + eps)`` of the last
            batch in training; float32, or float64 for such input. They are no buffers.

    Input is ``[N, C, H, W]``; float64, float32, float16 or bfloat16. It is used in the
    channels_last memory format, which the output has; another format is converted. Autocast casts
    it to its dtype first, except float64, and the output has that dtype.

    Raises:
        ValueError: ``group_size`` does not divide the number of ranks; input is not 4-D or has
            other channels; or a channel has a single value in training.
        TypeError: a dtype does not fit.
        RuntimeError: ``group_size`` is not 1, and ``torch.distributed`` is not initialized.

    Note:
        Gradients of weight and bias are this rank's, for DistributedDataParallel to average.
        ``state_dict`` has the entries of :class:`torch.nn.BatchNorm2d`.

    Source:
        Ioffe & Szegedy, *Batch Normalization*, 2015; Apex's class has the same arguments.

    Example:
        >>> norm = GroupBatchNorm2d(64, group_size=1)
        >>> norm(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 64, 8, 8])
    """

    def __init__(
        self,
        num_features: int,
        group_size: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        group_of(f"{NAME}: group_size", group_size)
        self.group_size = group_size
        self.minibatch_mean = torch.zeros(num_features)
        self.minibatch_inv_var = torch.zeros(num_features)

    def extra_repr(self) -> str:
        """The arguments, as print shows them."""
        return f"{super().extra_repr()}, group_size={self.group_size}"

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() != 4 or input.shape[1] != self.num_features:
            raise ValueError(
                f"{NAME}: input must have shape [N, {self.num_features}, H, W], got "
                f"{list(input.shape)}."
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` ``[N, C, H, W]``."""
        self._check_input_dim(input)
        if not is_amp(input):  # whose lists know no batch norm of ours
            (input,) = autocast(input)
        if not self.training:
            running = self.running_mean, self.running_var
            from_batch = self.running_mean is None
            return F.batch_norm(input, *running, self.weight, self.bias, from_batch, 0.0, self.eps)
        y, self.minibatch_mean, self.minibatch_inv_var = group_batch_norm(
            NAME,
            input.permute(0, 2, 3, 1),
            None,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.eps,
            momentum_now(self.momentum, self.num_batches_tracked),
            True,
            False,
            group_of(f"{NAME}: group_size", self.group_size),
            self.num_batches_tracked,
        )
        return y.permute(0, 3, 1, 2)
