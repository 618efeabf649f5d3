"""ResNet's bottleneck with frozen batch norm; SpatialBottleneck divides images over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .._shared.native.named_functions import NamedFunction
from .block import block
from .frozen import FrozenBatchNorm2d, compute_scale_bias_method, compute_scale_bias_one
from .halo_exchangers import HaloExchanger, pad

__all__ = [
    "Bottleneck",
    "BottleneckFunction",
    "FrozenBatchNorm2d",
    "SpatialBottleneck",
    "SpatialBottleneckFunction",
    "bottleneck_function",
    "compute_scale_bias_method",
    "compute_scale_bias_one",
    "conv1x1",
    "conv3x3",
    "drelu_dscale1",
    "drelu_dscale2",
    "kaiming_uniform_",
    "spatial_bottleneck_function",
]


def kaiming_uniform_(
    tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> None:
    """``torch.nn.init.kaiming_uniform_``, without a result."""
    nn.init.kaiming_uniform_(tensor, a=a, mode=mode, nonlinearity=nonlinearity)


def drelu_dscale1(grad_o: Tensor, output: Tensor, scale1: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before a scale and a ReLU; and before the ReLU alone."""
    before = grad_o * (output > 0)
    return before * scale1, before


def drelu_dscale2(
    grad_o: Tensor, output: Tensor, scale1: Tensor, scale2: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients before a ReLU and each of two scales, whose results were added."""
    before = grad_o * (output > 0)
    return before * scale1, before * scale2


def conv3x3(
    in_planes: int, out_planes: int, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    """A 3x3 convolution without bias, padded to keep the size."""
    size = {"kernel_size": 3, "stride": stride, "padding": dilation, "dilation": dilation}
    return nn.Conv2d(in_planes, out_planes, groups=groups, bias=False, **size)


def conv1x1(in_planes: int, out_planes: int, stride: int = 1) -> nn.Conv2d:
    """A 1x1 convolution without bias."""
    return nn.Conv2d(in_planes, out_planes, kernel_size=1, stride=stride, bias=False)


def _images(nhwc: bool, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.movedim(-1, 1) if nhwc else t for t in tensors]


def bottleneck_function(
    nhwc: bool,
    stride_1x1: int,
    scale: Sequence[Tensor],
    bias: Sequence[Tensor],
    x: Tensor,
    *conv: Tensor,
) -> Tensor:
    """The whole block, with scale, bias, ReLU and residual in one pass each.

    Args:
        nhwc: ``x`` is ``[N, H, W, C]`` and the weights ``[K, R, S, C]``; else channels are second.
        stride_1x1: of the first convolution.
        scale, bias: constants of three frozen batch norms, or four.
        conv: three weights, or four with that of the identity.
    """
    x, *conv = _images(nhwc, (x, *conv))
    y = block(stride_1x1, scale, bias, x, conv)
    return y.movedim(1, -1) if nhwc else y


def spatial_bottleneck_function(
    spatial_group_size: int,
    spatial_group_rank: int,
    spatial_communicator: Any,
    spatial_halo_exchanger: HaloExchanger | None,
    spatial_method: int,
    use_delay_kernel: bool,
    explicit_nhwc: bool,
    stride_1x1: int,
    scale: Sequence[Tensor],
    bias: Sequence[Tensor],
    thresholdTop: Tensor | None,
    thresholdBottom: Tensor | None,
    x: Tensor,
    *conv: Tensor,
) -> Tensor:
    """:func:`bottleneck_function` of this rank's rows; see :class:`SpatialBottleneck`.

    All methods give the same. Communicator, delay kernel and thresholds, by which Apex's methods
    find their borders, are not used.
    """
    if spatial_group_size < 2:
        return bottleneck_function(explicit_nhwc, stride_1x1, scale, bias, x, *conv)
    x, *conv = _images(explicit_nhwc, (x, *conv))
    padder = _padder(spatial_halo_exchanger, stride_1x1, x)
    y = block(stride_1x1, scale, bias, x, conv, padder)
    return y.movedim(1, -1) if explicit_nhwc else y


def _padder(exchanger: HaloExchanger | None, stride: int, x: Tensor) -> Callable[[Tensor], Tensor]:
    if exchanger is None:
        raise ValueError(
            "SpatialBottleneck: halo_exchanger is None, but images are divided over ranks; pass a "
            "HaloExchangerSendRecv, or another, in spatial_parallel_args."
        )
    if not exchanger.right_zero and x.shape[2] % stride:
        raise ValueError(
            f"SpatialBottleneck: a rank that is not the last must have a multiple of stride "
            f"{stride} rows, because the next rank's rows begin there; got {x.shape[2]}."
        )
    return lambda image: pad(image, exchanger, 2, 1)


class BottleneckFunction(NamedFunction):
    """Apex's class of :func:`bottleneck_function`."""

    apply = staticmethod(bottleneck_function)


class SpatialBottleneckFunction(NamedFunction):
    """Apex's class of :func:`spatial_bottleneck_function`."""

    apply = staticmethod(spatial_bottleneck_function)


class Bottleneck(nn.Module):
    r"""Three convolutions, 1x1, 3x3 and 1x1, with frozen batch norms, ReLUs and a residual.

    .. math:: y = \mathrm{relu}(b_3(w_3 \star \mathrm{relu}(b_2(w_2 \star
              \mathrm{relu}(b_1(w_1 \star x))))) + \mathrm{identity}(x))

    Args:
        in_channels, out_channels: of the input and of the output.
        bottleneck_channels: between the convolutions.
        stride: of the first convolution and of the identity's; where it is not 1, or
            ``in_channels`` is not ``out_channels``, the identity is a 1x1 convolution with frozen
            batch norm.
        groups, dilation: only 1.
        norm_func: only None: batch norms are frozen.
        use_cudnn: scale, bias, ReLU and residual in one pass each, by our kernels; else plain
            PyTorch, which ``torch.func`` and second derivatives take as well. The results are the
            same to within rounding. (Apex's name; there is no cuDNN on a CPU.)
        explicit_nhwc: input and output are ``[N, H, W, C]``, and the weights ``[K, R, S, C]``;
            needs ``use_cudnn``.

    Input is ``[N, in_channels, H, W]``; float64, float32, float16 or bfloat16, as the weights.
    Under autocast both are cast to its dtype.

    Attributes:
        conv1, bn1, conv2, bn2, conv3, bn3, downsample: the layers; downsample is None where the
            identity is the input.
        w_conv, w_bn: lists of the weights and batch norms, made anew whenever they are read.

    Raises:
        RuntimeError: ``groups`` or ``dilation`` is not 1, there is a ``norm_func``, or
            ``explicit_nhwc`` without ``use_cudnn``.

    Source:
        He et al., *Deep residual learning*, 2016, figure 5; Apex's class has the same arguments.

    Example:
        >>> block = Bottleneck(64, 16, 64)
        >>> block(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 64, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        bottleneck_channels: int,
        out_channels: int,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
        norm_func: Any = None,
        use_cudnn: bool = False,
        explicit_nhwc: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        for argument, got, taken in (
            ("groups", groups, 1),
            ("dilation", dilation, 1),
            ("norm_func", norm_func, None),
        ):
            if got != taken:
                raise RuntimeError(f"{name}: {argument} must be {taken}, got {got!r}.")
        if explicit_nhwc and not use_cudnn:
            raise RuntimeError(f"{name}: explicit_nhwc=True needs use_cudnn=True.")
        self.stride, self.use_cudnn, self.explicit_nhwc = stride, use_cudnn, explicit_nhwc
        self.conv1 = conv1x1(in_channels, bottleneck_channels, stride)
        self.conv2 = conv3x3(bottleneck_channels, bottleneck_channels)
        self.conv3 = conv1x1(bottleneck_channels, out_channels)
        self.bn1 = FrozenBatchNorm2d(bottleneck_channels)
        self.bn2 = FrozenBatchNorm2d(bottleneck_channels)
        self.bn3 = FrozenBatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            shortcut = conv1x1(in_channels, out_channels, stride)
            self.downsample = nn.Sequential(shortcut, FrozenBatchNorm2d(out_channels))
        self.w_scale: list[Tensor] | None = None
        self.w_bias: list[Tensor] | None = None
        for weight in self.w_conv:
            kaiming_uniform_(weight, a=1)
            if explicit_nhwc:
                weight.data = weight.data.movedim(1, -1).contiguous()

    @property
    def w_conv(self) -> list[Tensor]:
        layers = [self.conv1, self.conv2, self.conv3]
        if self.downsample is not None:
            layers.append(self.downsample[0])  # type: ignore[arg-type]
        return [layer.weight for layer in layers]

    @property
    def w_bn(self) -> list[FrozenBatchNorm2d]:
        layers = [self.bn1, self.bn2, self.bn3]
        return layers if self.downsample is None else [*layers, self.downsample[1]]  # type: ignore[list-item]

    def get_scale_bias_callable(self) -> Callable[[], None]:
        """Keep scales and biases in memory of their own; the function returned computes them anew.

        Call it after the statistics change; capture the module in a graph, and not the function.
        """
        self.w_scale, self.w_bias, args = [], [], []
        for bn in self.w_bn:
            scale, bias = (vector.clone() for vector in bn.get_scale_bias(self.explicit_nhwc))
            self.w_scale.append(scale)
            self.w_bias.append(bias)
            args.append((bn.weight, bn.bias, bn.running_mean, bn.running_var, scale, bias))
        return functools.partial(compute_scale_bias_method, self.explicit_nhwc, args)

    def _scales_and_biases(self) -> tuple[list[Tensor], list[Tensor]]:
        if self.w_scale is not None and self.w_bias is not None:
            return self.w_scale, self.w_bias
        pairs = [bn.get_scale_bias(self.explicit_nhwc) for bn in self.w_bn]
        return [scale for scale, _ in pairs], [bias for _, bias in pairs]

    def forward(self, x: Tensor) -> Tensor:
        scales, biases = self._scales_and_biases()
        if self.use_cudnn:
            given = self.explicit_nhwc, self.stride, scales, biases
            return bottleneck_function(*given, x, *self.w_conv)
        return block(self.stride, scales, biases, x, self.w_conv, fused=False)


class SpatialBottleneck(Bottleneck):
    """:class:`Bottleneck` of images whose rows are divided over ranks.

    Args:
        spatial_parallel_args: ``(spatial_group_size, spatial_group_rank, communicator,
            halo_exchanger, spatial_method, use_delay_kernel)``; None for whole images. The ranks
            are those of the exchanger, from the top of the image to the bottom. ``spatial_method``
            is 1, 2 or 3, and all give the same; communicator and delay kernel are not used.

    Each rank gives and gets its rows. Before the 3x3 convolution, neighbours exchange a row, and in
    the backward the gradient of that row; all ranks must call both in the same order. Gradients of
    the weights are this rank's part: their sum over the ranks is that of the undivided image.

    Raises:
        ValueError: a rank but the last has rows that ``stride`` does not divide; ``spatial_method``
            is another number; or there is no exchanger.

    The other arguments and errors are those of :class:`Bottleneck`.
    """

    def __init__(
        self,
        in_channels: int,
        bottleneck_channels: int,
        out_channels: int,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
        norm_func: Any = None,
        use_cudnn: bool = False,
        explicit_nhwc: bool = False,
        spatial_parallel_args: tuple[Any, ...] | None = None,
    ) -> None:
        channels = in_channels, bottleneck_channels, out_channels
        options = groups, dilation, norm_func, use_cudnn, explicit_nhwc
        super().__init__(*channels, stride, *options)
        given = (
            (1, 0, None, None, 0, False) if spatial_parallel_args is None else spatial_parallel_args
        )
        self.spatial_parallel_args = tuple(given)
        size, rank, _, exchanger, method, _ = self.spatial_parallel_args
        if size > 1:
            if method not in (1, 2, 3):
                raise ValueError(
                    f"SpatialBottleneck: spatial_method must be 1, 2 or 3, got {method!r}."
                )
            place = exchanger and (exchanger.group_size, exchanger.rank_in_group)
            if place not in (None, (size, rank)):
                raise ValueError(
                    f"SpatialBottleneck: spatial_parallel_args say rank {rank} of {size}, but its "
                    f"halo_exchanger is rank {exchanger.rank_in_group} of {exchanger.group_size}."
                )

    def forward(self, x: Tensor) -> Tensor:
        size, _, _, exchanger, *_ = self.spatial_parallel_args
        if size < 2:
            return super().forward(x)
        scales, biases = self._scales_and_biases()
        if self.use_cudnn:
            given = *self.spatial_parallel_args, self.explicit_nhwc, self.stride, scales, biases
            return spatial_bottleneck_function(*given, None, None, x, *self.w_conv)
        padder = _padder(exchanger, self.stride, x)
        return block(self.stride, scales, biases, x, self.w_conv, padder, fused=False)
