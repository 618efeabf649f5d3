"""SyncBatchNorm: batch normalization with the statistics of all ranks of a process group."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .._shared.native.plain import plainness
from .over_ranks import SyncBatchnormFunction, apply_plain


class SyncBatchNorm(_BatchNorm):
    r"""Batch normalization over the batches of all ranks, as if they were one.

    .. math:: y = \mathrm{relu}\left(\frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \gamma + \beta + z
              \right)

    :math:`\mu, \sigma^2` are mean and biased variance of a channel's elements on all ranks, which
    may hold batches of different, even empty, size. Running statistics take the unbiased variance.
    Forward gathers, and backward sums, two vectors of ``num_features`` over the ranks; gradients of
    weight and bias are this rank's, for DistributedDataParallel to average.

    Args:
        num_features: number of channels C.
        eps: added to the variance, in units of the input squared.
        momentum: share of the batch in the new running statistics; None for a cumulative average.
        affine: learn a weight :math:`\gamma` and a bias :math:`\beta`, ``[C]``.
        track_running_stats: keep running statistics and use them in eval mode; if False, the
            statistics of the (all ranks') batch are used in eval mode as well.
        process_group: the ranks that share statistics; None is the world.
        channel_last: input has shape ``[*, C]`` in contiguous memory. An input ``[N, C, *]`` in
            torch's channels_last memory format does not need this: it is recognised.
        fuse_relu: apply a ReLU.

    Shape:
        input and z ``[N, C, *]``, ``[N, C]``, or ``[*, C]``; the output like input, in its memory
        format. float64, float32, float16 or bfloat16; parameters in the input's dtype, or float32
        with 16-bit input. Statistics are taken in float32 (float64 for float64).

    Raises:
        ValueError: a shape does not fit, or a single value per channel in training.
        TypeError: a dtype does not fit.

    Note:
        ``state_dict`` has the entries of :class:`torch.nn.BatchNorm2d`; each loads the other's.
        Without an initialised ``torch.distributed`` this is plain batch normalization.

    Source:
        Ioffe & Szegedy, *Batch Normalization*, 2015.

    Example:
        >>> norm = SyncBatchNorm(64)
        >>> y = norm(torch.randn(8, 64, 32, 32))
    """

    __module__ = "apex.parallel.optimized_sync_batchnorm"  # Apex's path, which pickles hold
    syncbn_import_error = None  # there is one implementation, which needs no optional module

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def _specify_process_group(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def extra_repr(self) -> str:
        """The arguments, as print shows them."""
        return f"{super().extra_repr()}, channel_last={self.channel_last}, relu={self.fuse_relu}"

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize ``input``; ``z`` of its shape and dtype is added before the ReLU."""
        parameters, buffers = self._parameters, self._buffers
        try:  # attributes of modules take a while to look up
            weight, bias = parameters["weight"], parameters["bias"]
            mean, var = buffers["running_mean"], buffers["running_var"]
        except KeyError:  # parametrized, or views of a flat parameter
            weight, bias, mean, var = self.weight, self.bias, self.running_mean, self.running_var
        from_batch = self.training or mean is None
        plain = z is None and not self.fuse_relu and not (self.channel_last and input.dim() > 2)
        if plain and not from_batch:
            return F.batch_norm(input, mean, var, weight, bias, eps=self.eps)
        updates = self.training and self.track_running_stats and mean is not None
        momentum = self.momentum if updates else 0.0
        if momentum is None:  # a cumulative average
            momentum = 1.0 / (float(buffers["num_batches_tracked"]) + 1.0)
        is_plain = plainness(input, z, weight, bias)
        return (apply_plain if is_plain else SyncBatchnormFunction.apply)(
            input,
            z,
            weight,
            bias,
            mean if updates or not from_batch else None,
            var if updates or not from_batch else None,
            self.eps,
            from_batch,
            momentum,
            self.process_group,
            self.channel_last,
            self.fuse_relu,
            buffers.get("num_batches_tracked") if updates else None,
        )
