"""A model's head and its loss in chunks of tokens: the logits of all tokens are never stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting
from torch.nn import functional as F

from .._shared.native.composed import Composed
from .._shared.native.half_matmul import needs_float32
from .._shared.native.operands import check_floating, is_autocast, statistics_dtype
from .._shared.native.transforms import is_transformed
from .chunks import NO_PADDING, Option, losses_of, walk

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]

_NAME = "linear_cross_entropy"
_REDUCTIONS = ("none", "mean", "sum")


def _reduced(option: Option, losses: Tensor, share: Tensor) -> Tensor:
    if option.reduction == "none":
        return losses
    return losses.sum() * share if option.reduction == "mean" else losses.sum()


def _share(option: Option, like: Tensor, labels: Tensor) -> Tensor:
    """What the loss of a token counts in a result of all."""
    if option.reduction != "mean":
        return like.new_ones(())
    return (labels != option.padding_idx).sum().to(like.dtype).reciprocal()


def _forward(option: Option, *tensors: Any) -> tuple[Any, ...]:
    hidden, labels = tensors[0], tensors[3]
    like = hidden.new_empty(0, dtype=statistics_dtype(hidden.dtype))
    wanted = (False,) * 3 if option.is_late else option.wanted
    share = _share(option, like, labels)
    statistics, gradients = walk(option, tensors, wanted, share)
    loss = _reduced(option, losses_of(option, statistics, labels), share)
    return loss, *([statistics] if option.is_late else gradients)


def _backward(
    option: Option, needs: Sequence[bool], dy: Tensor, saved: Sequence[Any]
) -> list[Tensor | None]:
    tensors, kept = saved[:4], saved[4:]
    if option.is_late:
        statistics = kept[0]
        if option.reduction != "none":
            dy = dy * _share(option, statistics, tensors[3])
        grads = dy.to(statistics.dtype)
        return [*walk(option, tensors, needs[:3], grads, statistics)[1], None]
    return [*(_scaled(gradient, dy) for gradient in kept), None]


def _scaled(gradient: Tensor | None, dy: Tensor) -> Tensor | None:
    """``gradient * dy``: itself where dy is seen to be 1, and nothing is copied.

    A dy without dimensions would be rounded to the gradient's 16 bits before the product.
    """
    if gradient is None or (dy.is_cpu and not is_compiling() and dy.item() == 1):
        return gradient
    if gradient.dtype == dy.dtype:
        return gradient * dy
    factor = dy.reshape([1] * gradient.dim())
    return torch.mul(gradient, factor, out=torch.empty_like(gradient))


def _reference(
    option: Option, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> Tensor:
    """The same in plain PyTorch, with all logits."""
    if option.group is not None:
        raise NotImplementedError(
            f"{_NAME}: group is given, but a transform of torch.func, a tracer, forward mode, a "
            "DTensor or a second derivative asks for plain PyTorch, which knows no group; leave "
            "group out, with the whole weight."
        )
    logits = F.linear(
        hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    )
    if option.softcap:
        logits = option.softcap * torch.tanh(logits / option.softcap)
    logits = logits.to(statistics_dtype(logits.dtype))
    counts = labels != option.padding_idx
    lse = logits.logsumexp(-1)
    target = logits.gather(-1, labels.where(counts, 0)[:, None])[:, 0]
    losses = lse - target
    if option.smoothing:  # 0 * inf is NaN
        losses = losses + option.smoothing * (target - logits.mean(-1))
    if option.z_loss:
        losses = losses + option.z_loss * lse.square()
    losses = losses.where(counts, 0)
    return _reduced(option, losses, _share(option, losses, labels))


_linear_cross_entropy = Composed(_NAME, _forward, _backward, _reference)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    padding_idx: int | None = -100,
    reduction: str = "mean",
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    recompute: bool = False,
    chunk_size: int | None = None,
    group: Any = None,
) -> Tensor:
    r"""Cross entropy of a linear layer's output, which is never stored.

    .. math::
        x = \mathrm{hidden} \, W^T + b, \qquad
        \mathrm{loss} = (1 - s)\,(\mathrm{lse} - x_\mathrm{label})
                        + s\,(\mathrm{lse} - \mathrm{mean}(x)) + z \, \mathrm{lse}^2

    with ``lse = log(sum(exp(x)))``. The product and the loss of some tokens at a time are computed,
    and at once their gradients, so that memory holds the logits of one chunk beside ``hidden``,
    ``weight`` and their gradients. Where ``weight`` has 16 bits and there are more than four
    chunks, its gradient is summed in float32, which takes 4 bytes an element more until the forward
    ends; four chunks are added in 16 bits.

    Args:
        hidden: ``[..., H]``; float64, float32, float16 or bfloat16. Autocast casts it.
        weight: ``[C, H]``, ``C > 0``, of the same dtype, or float32 beside 16-bit ``hidden``: its
            gradient then is a sum in float32.
        labels: ``[...]`` int64, each in ``[0, C)`` or ``padding_idx``.
        bias: ``[C]``, of the dtype of ``weight``.
        smoothing: ``s``, in ``[0, 1]``, the share of the target spread evenly over all classes.
        padding_idx: tokens with this label have loss 0 and no gradient. In eager mode they are left
            out of all products. None: all tokens count.
        reduction: "mean" over the tokens that count, "sum", or "none".
        z_loss: ``z``, which pulls ``lse`` to 0; about 1e-4 where it is used.
        softcap: ``cap``, if logits are ``cap * tanh(x / cap)`` as in Gemma 2; > 0.
        recompute: the backward computes the logits again, and makes the gradients then. It takes a
            third longer, and the forward alone takes no memory for gradients. ``reduction="none"``
            always does so, since only the backward knows the gradients of single losses; and
            float16, whose gradients would underflow without the loss scale that comes with them.
        chunk_size: tokens whose logits are in memory at a time; by default so many that they take
            as much as ``hidden``, but at least 1024, and where ``weight`` has 16 bits and there are
            at most 8 H tokens, a quarter of these.
        group: a process group over which the classes are divided, such as the tensor-parallel group
            of ``apex.transformer``: ``weight`` and ``bias`` are this rank's, in the order of ranks;
            ``hidden`` and ``labels`` are the same on all ranks, with labels of the whole
            vocabulary. The gradient of ``hidden`` is summed over the group here.

    Returns:
        A number, or ``[...]`` for "none"; float32, or float64 for float64 ``hidden``. The mean of
        no token is NaN, as of ``F.cross_entropy``.

    Raises:
        TypeError: a dtype is not one of those above.
        ValueError: a shape, a device or a number does not fit.
        RuntimeError: a label is out of range, on the CPU. On a GPU that gives NaN.
        NotImplementedError: with ``group``, transforms of ``torch.func``, tracers, forward mode,
            DTensors and second derivatives. Without it, plain PyTorch computes these.

    Source:
        Szegedy et al. 2016, section 7 (smoothing); Chowdhery et al. 2022, section 5 (z-loss); Gemma
        Team 2024, section 2 (softcap). Chunks with gradients in the forward: Hsu et al., *Liger
        Kernel*, 2024, section 3.

    Example:
        >>> hidden = torch.randn(32, 16, requires_grad=True)
        >>> weight = torch.randn(1000, 16, requires_grad=True)
        >>> labels = torch.randint(1000, (32,))
        >>> linear_cross_entropy(hidden, weight, labels).backward()
    """
    _check(hidden, weight, labels, bias)
    _check_numbers(smoothing, reduction, z_loss, softcap, chunk_size)
    if is_autocast(hidden) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    if needs_float32(hidden, weight):
        hidden = hidden.float()
    wanted = tuple(
        t is not None and t.requires_grad and torch.is_grad_enabled()
        for t in (hidden, weight, bias)
    )
    option = Option(
        float(smoothing),
        NO_PADDING if padding_idx is None else int(padding_idx),
        reduction,
        float(z_loss),
        float(softcap or 0),
        chunk_size,
        recompute or hidden.dtype == torch.float16,
        group,
        wanted,
    )
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    call = _reference if is_transformed() or is_exporting() else _linear_cross_entropy
    loss = call(option, rows, weight, bias, flat)
    return loss.reshape(labels.shape) if reduction == "none" else loss


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    check_floating(_NAME, "hidden", hidden)
    halves = (torch.float16, torch.bfloat16)
    for name, tensor, shape in (("weight", weight, "[C, H]"), ("bias", bias, "[C]")):
        if tensor is None and name == "bias":
            continue
        check_floating(_NAME, name, tensor)
        fits = tensor.dtype == hidden.dtype or is_autocast(hidden)
        if not (fits or (tensor.dtype == torch.float32 and hidden.dtype in halves)):
            raise TypeError(
                f"{_NAME}: {name} must have the dtype of hidden, or float32 beside 16-bit hidden; "
                f"got {tensor.dtype} and {hidden.dtype}."
            )
        if tensor.device != hidden.device:
            raise ValueError(
                f"{_NAME}: hidden is on {hidden.device}, but {name} is on {tensor.device}."
            )
        if tensor.dim() != shape.count(",") + 1:
            raise ValueError(f"{_NAME}: {name} must have shape {shape}, got {list(tensor.shape)}.")
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1] or weight.shape[0] == 0:
        raise ValueError(
            f"{_NAME}: hidden must have shape [..., H] and weight [C, H] with C > 0, got "
            f"{list(hidden.shape)} and {list(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{_NAME}: bias must have shape [{weight.shape[0]}], one number per row of weight, got "
            f"{list(bias.shape)}."
        )
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"{_NAME}: labels must be an int64 tensor, got {got}; use labels.long().")
    if labels.shape != hidden.shape[:-1] or labels.device != hidden.device:
        raise ValueError(
            f"{_NAME}: labels must have shape {list(hidden.shape[:-1])} and be on {hidden.device}, "
            f"one label per row of hidden; got {list(labels.shape)} on {labels.device}."
        )


def _check_numbers(
    smoothing: float,
    reduction: str,
    z_loss: float,
    softcap: float | None,
    chunk_size: int | None,
) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{_NAME}: reduction must be one of {_REDUCTIONS}, got {reduction!r}.")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{_NAME}: smoothing must be in [0, 1], got {smoothing}.")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"{_NAME}: z_loss must be finite and not negative, got {z_loss}.")
    if softcap is not None and not 0.0 < softcap < float("inf"):
        raise ValueError(f"{_NAME}: softcap must be finite and above 0, or None, got {softcap}.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{_NAME}: chunk_size must be at least 1, got {chunk_size}.")


class LinearCrossEntropyLoss(nn.Module):
    """:func:`linear_cross_entropy` with its options: ``loss(hidden, lm_head.weight, labels)``.

    Args and errors are those of the function.

    Example:
        >>> head, loss = nn.Linear(16, 1000, bias=False), LinearCrossEntropyLoss(z_loss=1e-4)
        >>> loss(torch.randn(32, 16), head.weight, torch.randint(1000, (32,))).backward()
    """

    def __init__(
        self,
        smoothing: float = 0.0,
        padding_idx: int | None = -100,
        reduction: str = "mean",
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        recompute: bool = False,
        chunk_size: int | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        _check_numbers(smoothing, reduction, z_loss, softcap, chunk_size)
        self.smoothing, self.padding_idx, self.reduction = smoothing, padding_idx, reduction
        self.z_loss, self.softcap, self.recompute = z_loss, softcap, recompute
        self.chunk_size, self.group = chunk_size, group

    def forward(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return the loss of ``hidden @ weight.T + bias``."""
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias,
            self.smoothing,
            self.padding_idx,
            self.reduction,
            z_loss=self.z_loss,
            softcap=self.softcap,
            recompute=self.recompute,
            chunk_size=self.chunk_size,
            group=self.group,
        )
