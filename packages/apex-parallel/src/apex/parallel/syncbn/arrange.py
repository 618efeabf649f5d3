"""Between the tensors of a module and what the kernels read: layout, dtype, and checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._shared.native.operands import FLOATS, check_floating, statistics_dtype

NAME = "SyncBatchNorm"


@dataclass(frozen=True)
class Arrangement:
    """How the kernels see an input.

    ``channel_last``: they take it as ``[*, C]``. ``moved``: it is ``[N, C, *]`` to the user and its
    channels are moved to the end for that, free of charge in torch's channels_last memory format.
    ``flattened``: the user's shape ``[N, C, 1, ...]``, of which they take ``[N, C]``.
    """

    channel_last: bool
    moved: bool = False
    flattened: torch.Size | None = None

    def arrange(self, tensor: Tensor) -> Tensor:
        """The contiguous tensor for the kernels; copies only if the memory has another order."""
        if self.flattened is not None:
            tensor = tensor.reshape(self.flattened[:2])
        return (tensor.movedim(1, -1) if self.moved else tensor).contiguous()

    def restore(self, tensor: Tensor) -> Tensor:
        """A kernel's result in the user's order of dimensions and the input's memory format."""
        if self.flattened is not None:
            return tensor.view(self.flattened)
        return tensor.movedim(-1, 1) if self.moved else tensor

    def output(self, tensor: Tensor) -> Tensor:
        """``restore`` for what ``forward`` returns, which ``ReLU(inplace=True)`` may then change.

        Autograd refuses in-place changes of a view that was made inside a Function.
        """
        return self.restore(tensor).data


# Made once, as they take 1 us.
_LAST, _SECOND = Arrangement(channel_last=True), Arrangement(channel_last=False)
_MOVED = Arrangement(channel_last=True, moved=True)


def arrangement_of(input: Tensor, channel_last: bool) -> Arrangement:
    """The arrangement that needs no copy, or for ``[N, C, *]`` in odd strides, plain contiguous."""
    if channel_last or input.dim() == 2:
        return _LAST
    if input.numel() == input.shape[0] * input.shape[1]:
        return Arrangement(channel_last=True, flattened=input.shape)
    if not input.is_contiguous() and input.movedim(1, -1).is_contiguous():
        return _MOVED
    return _SECOND


def channels_of(input: Tensor, channel_last: bool) -> int:
    """Number of channels of ``[N, C, *]``, ``[N, C]``, or with ``channel_last`` of ``[*, C]``."""
    return input.shape[-1] if channel_last else input.shape[1]


def check_operands(
    input: Tensor,
    z: Tensor | None,
    vectors: dict[str, Tensor | None],
    channel_last: bool,
) -> int:
    """Raise for operands that the kernels cannot take; return the number of channels.

    Args:
        vectors: per-channel tensors by name; ``weight`` and ``bias`` among them are checked for
            their dtype too.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a dtype does not fit.
    """
    if input.dim() < 2:
        raise ValueError(
            f"{NAME}: input must have a batch and a channel dimension, got shape "
            f"{list(input.shape)}."
        )
    if input.dtype not in FLOATS or input.layout is not torch.strided:
        check_floating(NAME, "input", input)
    shape, dtype = input.shape, input.dtype
    channels = shape[-1] if channel_last else shape[1]
    for name, vector in vectors.items():
        if vector is None:
            continue
        if vector.dtype is dtype and vector.shape == (channels,):  # as nearly always
            continue
        if vector.shape != (channels,):
            raise ValueError(
                f"{NAME}: {name} has shape {list(vector.shape)}, but input has {channels} channels "
                f"(input: {list(input.shape)}, channel_last={channel_last})."
            )
        if name in ("weight", "bias") and vector.dtype not in (
            input.dtype,
            statistics_dtype(input.dtype),
        ):
            raise TypeError(
                f"{NAME}: {name} is {vector.dtype}, but input is {input.dtype}. It must have the "
                "input's dtype, or be float32 with a 16-bit input; cast one of them."
            )
    if z is not None and (z.shape != input.shape or z.dtype != input.dtype):
        raise (ValueError if z.shape != input.shape else TypeError)(
            f"{NAME}: z is {list(z.shape)} {z.dtype}, but input is {list(input.shape)} "
            f"{input.dtype}; they are added."
        )
    return channels


def affine_vectors(
    input: Tensor, channels: int, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weight and bias in the statistics' dtype, contiguous; 1 and 0 where they are None."""
    dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
    return (
        input.new_ones(channels, dtype=dtype) if weight is None else weight.to(dtype).contiguous(),
        input.new_zeros(channels, dtype=dtype) if bias is None else bias.to(dtype).contiguous(),
    )
