"""What convolutions are given: messages say what was expected."""

from __future__ import annotations

from torch import Tensor

from .._shared.native.operands import check_floating

__all__ = [
    "check_convolution",
    "check_like",
    "check_mask",
    "check_mask_shape",
    "check_vector",
    "check_window",
    "pair",
]


def pair(name: str, argument: str, value: int | tuple[int, int], lowest: int) -> tuple[int, int]:
    """``value`` for height and width.

    Raises:
        ValueError: it is neither a number nor two, or below ``lowest``.
    """
    both = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(both) != 2 or not all(isinstance(v, int) and v >= lowest for v in both):
        raise ValueError(
            f"{name}: {argument} must be an int >= {lowest}, or two (height, width), got {value!r}."
        )
    return both


def check_convolution(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise TypeError or ValueError unless ``weight`` can be moved over ``x``."""
    check_floating(name, "x", x)
    check_like(name, "weight", weight, x)
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{name}: x must have shape [N, C, H, W] and weight [K, C, R, S] with the same C, got "
            f"{list(x.shape)} and {list(weight.shape)}."
        )


def check_window(name: str, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> None:
    """Raise ValueError unless ``weight`` fits into the padded ``x``."""
    sizes = [size + 2 * zeros for size, zeros in zip(x.shape[2:], padding, strict=True)]
    if any(size < window for size, window in zip(sizes, weight.shape[2:], strict=True)):
        raise ValueError(
            f"{name}: windows of {list(weight.shape[2:])}, as weight has them, do not fit into x "
            f"{list(x.shape)} with padding {list(padding)}."
        )


def check_vector(name: str, argument: str, vector: Tensor, x: Tensor, weight: Tensor) -> None:
    """Raise TypeError or ValueError unless there is one number for each channel that comes out."""
    check_like(name, argument, vector, x)
    channels = weight.shape[0]
    if vector.numel() != channels or max(vector.shape, default=1) != channels:
        raise ValueError(
            f"{name}: {argument} must hold one number for each of the {channels} channels that "
            f"weight {list(weight.shape)} makes, as [{channels}] or [1, {channels}, 1, 1]; got "
            f"{list(vector.shape)}."
        )


def check_like(name: str, argument: str, tensor: Tensor, x: Tensor) -> None:
    """Raise TypeError or ValueError unless ``tensor`` has the dtype and device of ``x``."""
    if not isinstance(tensor, Tensor) or tensor.dtype != x.dtype:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: {argument} is {got}, but x is {x.dtype}; cast, or use autocast.")
    if tensor.device != x.device:
        raise ValueError(
            f"{name}: {argument} is on {tensor.device}, but x is on {x.device}; move one."
        )


def check_mask(name: str, mask: Tensor, x: Tensor) -> None:
    """Raise TypeError or ValueError unless ``mask`` is a tensor of four dimensions beside ``x``."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: mask must be a tensor, got {type(mask).__name__}.")
    if mask.device != x.device or mask.dim() != 4:
        raise ValueError(
            f"{name}: mask must have the output's four dimensions and be on {x.device}, got "
            f"{list(mask.shape)} on {mask.device}."
        )


def check_mask_shape(mask: Tensor, y: Tensor) -> None:
    """Raise ValueError unless ``mask`` has the shape of the output, or 1 in its place."""
    if any(m not in (1, size) for m, size in zip(mask.shape, y.shape, strict=True)):
        raise ValueError(
            f"ConvBiasMaskReLU: mask must have the output's shape {list(y.shape)}, or 1 in its "
            f"place, got {list(mask.shape)}."
        )
