"""Softmax cross entropy with label smoothing, fused: the class that users call."""

from __future__ import annotations

import torch
from torch import Tensor

from .._shared.native.formula import Formula
from .._shared.native.named_functions import NamedFunction
from .._shared.native.operands import check_floating
from .._shared.native.plain import explain, plainness
from . import ops

__all__ = ["SoftmaxCrossEntropyLoss", "decompositions"]

_HALVES = (torch.float16, torch.bfloat16)


def _reference(
    logits: Tensor,
    labels: Tensor,
    smoothing: float,
    padding_idx: int | None,
    half_to_float: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``softmax_xentropy_forward`` does, in plain PyTorch."""
    labels = labels[:, None]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_padding = torch.zeros_like(labels, dtype=torch.bool)
    if padding_idx is not None:
        is_padding = labels == padding_idx
        # Before the arithmetic: a NaN of a padding row would reach its gradient.
        wide = wide.masked_fill(is_padding, 0)
    classes = logits.shape[1]
    maxima = wide.detach().amax(1)
    shifted = wide - maxima[:, None]
    sums_exp = shifted.exp().sum(1)
    # A label that is not a class gets here on a GPU only.
    is_class = (labels >= 0) & (labels < classes)
    of_label = shifted.gather(1, labels.where(is_class, 0))
    of_label = of_label.masked_fill(~is_class & ~is_padding, torch.nan)[:, 0]
    losses = sums_exp.log() - (1 - smoothing) * of_label - smoothing * shifted.mean(1)
    is_padding = is_padding[:, 0]
    losses = losses.masked_fill(is_padding, 0)
    sums_exp = sums_exp.masked_fill(is_padding, 1)
    dtype = torch.float32 if half_to_float else logits.dtype
    return losses.to(dtype), maxima, sums_exp


_softmax_xentropy = Formula(
    "SoftmaxCrossEntropyLoss",
    ops.softmax_xentropy_forward,
    ops.softmax_xentropy_backward,
    _reference,
    saves=("logits", "maxima", "sums_exp", "labels", "smoothing", "padding_idx"),
    grads=("logits",),
    rows={"logits": 1, "labels": 0},
)
decompositions = _softmax_xentropy.decompositions
"""The operators in ATen's, for ``ExportedProgram.run_decompositions``: call it."""


class SoftmaxCrossEntropyLoss(NamedFunction):
    r"""Cross entropy of each row of logits with its label; call :meth:`apply`.

    .. math::
        \mathrm{loss} = (1 - s)\,(\mathrm{lse} - x_\mathrm{label})
                        + s\,(\mathrm{lse} - \mathrm{mean}(x)),
        \qquad \mathrm{lse} = \log \sum_c e^{x_c}

    which is ``F.cross_entropy(logits, labels, label_smoothing=s, reduction="none")``, but for the
    padding. Neither probabilities nor their logarithms are stored: the forward pass reads the
    logits once, the backward pass reads them again and writes the gradient. Plain PyTorch computes
    the same within transforms of ``torch.func`` and in forward mode, and gradients that are taken
    with ``create_graph=True``. DTensors that are sharded along the rows stay on their processes.

    .. warning::
        **``padding_idx`` is 0 unless you say otherwise: every row with label 0 then has loss 0 and
        no gradient.** This is Apex's default. If label 0 is a real class, pass
        ``padding_idx=None``, or ``-100`` as ``F.cross_entropy`` does.

    Example:
        >>> logits = torch.randn(4, 10, requires_grad=True)
        >>> labels = torch.tensor([3, 0, 9, 1])
        >>> losses = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, None)
        >>> losses.mean().backward()
    """

    @staticmethod
    def apply(
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int | None = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """Losses, one per row, not reduced.

        Args:
            logits: ``[N, C]``, ``C > 0``; float64, float32, float16 or bfloat16; CPU or GPU. Rows
                may have gaps between them; other strides are copied first. Computed in float32, or
                float64 for float64, also under autocast, which changes nothing here.
            labels: ``[N]`` int64 on the same device, each in ``[0, C)`` or ``padding_idx``.
            smoothing: ``s``, the share of the target spread evenly over all classes; in ``[0, 1]``.
            padding_idx: rows with this label have loss 0 and gradient 0, whatever their logits
                are. **Default 0, as in Apex**; None: no row is left out.
            half_to_float: give float32 losses for float16 or bfloat16 logits.

        Returns:
            ``[N]``, of the logits' dtype, or float32 with ``half_to_float``.

        Raises:
            ValueError: shapes or devices do not fit, ``smoothing`` is out of range, or
                ``half_to_float`` is asked for other logits.
            TypeError: a dtype is not one of those above, or one operand alone is a DTensor.
            RuntimeError: a label is out of range, on the CPU. On a GPU, where the check would wait
                for the device, and where plain PyTorch computes, that row's loss and gradient are
                NaN instead.

        Source:
            Szegedy et al., *Rethinking the Inception Architecture*, CVPR 2016, section 7.
        """
        try:
            if (answer := plainness(logits, labels)) and not (half_to_float or logits.is_meta):
                call = _softmax_xentropy.plain[answer]
                return call(logits, labels, smoothing, padding_idx, False)
        except (AttributeError, RuntimeError):  # of None, and of the operator's checks
            explain(_check, logits, labels, smoothing, half_to_float)
        _check(logits, labels, smoothing, half_to_float)
        return _softmax_xentropy(logits, labels, smoothing, padding_idx, half_to_float)


def _check(logits: Tensor, labels: Tensor, smoothing: float, half_to_float: bool) -> None:
    """Raise for arguments that the kernels do not take; kernels check the labels' values."""
    name = "SoftmaxCrossEntropyLoss"
    check_floating(name, "logits", logits)
    if labels.dtype != torch.int64:
        raise TypeError(f"{name}: labels must be int64, got {labels.dtype}; use labels.long().")
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(
            f"{name}: logits must have shape [N, C] with C > 0, got {list(logits.shape)}; "
            "flatten leading dimensions."
        )
    if labels.dim() != 1 or labels.shape[0] != logits.shape[0]:
        raise ValueError(
            f"{name}: labels must have shape [{logits.shape[0]}], one label per row of logits "
            f"{list(logits.shape)}, got {list(labels.shape)}."
        )
    if labels.device != logits.device:
        raise ValueError(
            f"{name}: logits are on {logits.device}, but labels are on {labels.device}."
        )
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{name}: smoothing must be in [0, 1], got {smoothing}.")
    if half_to_float and logits.dtype not in _HALVES:
        raise ValueError(
            f"{name}: half_to_float is for float16 and bfloat16 logits, got {logits.dtype}; "
            "leave it False."
        )
