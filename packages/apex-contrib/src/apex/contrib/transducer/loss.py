"""Loss of transducers (RNN-T), in one pass over the logits and one over the lattice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._shared.native.formula import Formula
from .._shared.native.named_functions import NamedFunction
from .._shared.native.operands import check_floating, exact, is_dtensor
from .._shared.native.plain import explain, plainness
from .cells import INTEGERS, are_counts, check_devices, check_integers, check_lengths
from .transducer_loss import ops, plain

__all__ = ["TransducerLoss", "TransducerLossFunc", "decompositions"]

_NAME = "TransducerLoss"
_loss = Formula(
    _NAME,
    ops.transducer_loss_forward,
    ops.transducer_loss_backward,
    plain.transducer_loss,
    saves=(
        *("x", "maxima", "sums_exp", "scores", "alpha", "beta"),
        *("label", "f_len", "y_len", "batch_offset", "blank", "max_f_len", "softmax"),
    ),
    grads=("x",),
    rows={"x": 3, "label": 1, "f_len": 0, "y_len": 0},
)
decompositions = _loss.decompositions
"""The operators in ATen's, for ``ExportedProgram.run_decompositions``: call it."""


class TransducerLoss(nn.Module):
    r"""Loss of transducers, ``-log P(label | x)`` over all alignments.

    .. math::

        \alpha_{tu} = \log(e^{\alpha_{t-1,u} + b_{t-1,u}} + e^{\alpha_{t,u-1} + l_{t,u-1}}), \quad
        loss = -(\alpha_{F-1,Y} + b_{F-1,Y})

    with the log-probabilities ``b`` of the blank and ``l`` of the next label, of a softmax over the
    last dimension of ``x``.

    Args:
        fuse_softmax_backward, opt: have no effect: softmax's gradient is always part of the one
            pass. (Apex's gave no gradient at all with ``False``.)
        packed_input: ``x`` has no cells outside of the samples' lengths.

    Source:
        Graves 2012, "Sequence transduction with recurrent neural networks", section 2.4,
        https://arxiv.org/abs/1211.3711

    Example:
        >>> x = torch.randn(2, 5, 4, 30, requires_grad=True)  # 5 frames, 3 labels, 30 classes
        >>> label, f_len, y_len = torch.randint(1, 30, (2, 3)), [5, 4], [3, 2]
        >>> lengths = torch.tensor(f_len), torch.tensor(y_len)
        >>> TransducerLoss()(x, label, *lengths, blank_idx=0).shape
        torch.Size([2])
    """

    def __init__(
        self, fuse_softmax_backward: bool = True, opt: int = 1, packed_input: bool = False
    ) -> None:
        super().__init__()
        self.fuse_softmax_backward, self.opt = fuse_softmax_backward, opt
        self.packed_input = packed_input

    def forward(
        self,
        x: Tensor,
        label: Tensor,
        f_len: Tensor,
        y_len: Tensor,
        blank_idx: int,
        batch_offset: Tensor | None = None,
        max_f_len: int | None = None,
        debug_list: list | None = None,
    ) -> Tensor:
        """Return the loss of every sample.

        Args:
            x: logits ``[B, T, U, V]``: frames, labels and one, classes; float64, float32, float16
                or bfloat16; any layout. Packed: ``[sum(f_len * (y_len + 1)), V]``.
            label: ``[B, U - 1]`` int32 or int64, each in ``[0, V)``; those behind ``y_len`` are not
                read.
            f_len: ``[B]`` int32 or int64, how many frames each sample has, 0 to ``T``.
            y_len: ``[B]`` int32 or int64, how many labels each sample has, 0 to ``U - 1``.
            blank_idx: the class of the blank.
            batch_offset: of packed ``x``, ``[B]``: ``cumsum(f_len * (y_len + 1))``.
            max_f_len: of packed ``x``: the largest of ``f_len``, or more.
            debug_list: an empty list receives alpha and beta, in the layout of ``x`` without ``V``.

        Returns:
            ``[B]``, in the dtype of ``x``: computed in float32 at least, and rounded once (a
            float16 loss beyond 65,504 is inf). A sample without frames has 0, or inf if it has
            labels; a sample whose labels are impossible has inf, and a gradient of NaN. Cells of
            ``x`` outside of the lengths are not read; their gradient is 0. Derivatives of any order
            work.

        Raises:
            TypeError: a dtype is not one of those above.
            ValueError: shapes or devices do not fit, or packed ``x`` is without ``batch_offset``
                or ``max_f_len``.
            RuntimeError: lengths or labels are out of range; on a CPU. On a GPU, where the check
                would wait for the device, the loss of that sample is NaN, and nothing is read out
                of bounds.
        """
        try:
            if (
                not self.packed_input
                and debug_list is None
                and (answer := plainness(x, label, f_len, y_len))
                and x.dim() == 4
                and label.dtype in INTEGERS
                and are_counts(f_len, y_len)
                and not x.is_meta
            ):
                lengths = f_len.long().contiguous(), y_len.long().contiguous()
                given = x.contiguous(), label.long().contiguous(), *lengths, None
                loss = _loss.plain[answer](*given, int(blank_idx), x.shape[1], True)
                return loss.to(x.dtype)
        except (AttributeError, RuntimeError):  # of None, and of the operator's checks
            explain(_check, x, label, f_len, y_len, blank_idx, None)
        packed = (batch_offset, max_f_len) if self.packed_input else None
        arguments = arguments_of(x, label, f_len, y_len, blank_idx, packed)
        if debug_list is not None and len(debug_list) == 0:
            with torch.no_grad():
                loss, *_, alpha, beta = ops.transducer_loss_forward(*arguments)
            debug_list += [alpha.to(loss.dtype), beta.to(loss.dtype)]
        return _loss(*arguments).to(x.dtype)


class TransducerLossFunc(NamedFunction):
    """Apex's class of :class:`TransducerLoss`; ``apply`` takes its arguments in Apex's order."""

    @staticmethod
    def apply(
        x: Tensor,
        label: Tensor,
        f_len: Tensor,
        y_len: Tensor,
        batch_offset: Tensor | None,
        max_f_len: int | None,
        blank_idx: int,
        fuse_softmax_backward: bool = True,
        debug_list: list | None = None,
        opt: int = 1,
        packed_input: bool = False,
    ) -> Tensor:
        """See :meth:`TransducerLoss.forward`."""
        module = TransducerLoss(fuse_softmax_backward, opt, packed_input)
        return module(x, label, f_len, y_len, blank_idx, batch_offset, max_f_len, debug_list)


def arguments_of(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    blank: int,
    packed: tuple[Tensor | None, int | None] | None,
    softmax: bool = True,
) -> tuple:
    """The operators' arguments; raise TypeError or ValueError for what they do not take."""
    _check(x, label, f_len, y_len, blank, packed)
    ends, frames = packed or (None, x.shape[1])
    given = label, f_len, y_len, ends
    numbers = (None if t is None else exact(t, torch.int64) for t in given)
    return exact(x), *numbers, int(blank), int(frames), softmax


def _check(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    blank: int,
    packed: tuple[Tensor | None, int | None] | None,
) -> None:
    _check_logits(x, label, blank, packed is not None)
    ends, frames = packed or (None, None)
    if packed and (ends is None or frames is None):
        raise ValueError(
            f"{_NAME}: packed_input=True needs batch_offset, torch.cumsum(f_len * (y_len + 1), 0), "
            f"and max_f_len, got {ends} and {frames}."
        )
    check_lengths(_NAME, "f_len", f_len, len(label))
    check_lengths(_NAME, "y_len", y_len, len(label))
    if packed:
        check_lengths(_NAME, "batch_offset", ends, len(label))
        if is_dtensor(x):
            raise TypeError(f"{_NAME}: packed_input=True takes no DTensor; give x.full_tensor().")
    given = {"label": label, "f_len": f_len, "y_len": y_len, "batch_offset": ends}
    check_devices(_NAME, "x", x.device, **given)


def _check_logits(x: Tensor, label: Tensor, blank: int, is_packed: bool) -> None:
    check_floating(_NAME, "x", x)
    check_integers(_NAME, "label", label)
    if label.dim() != 2:
        raise ValueError(f"{_NAME}: label must have shape [B, U - 1], got {list(label.shape)}.")
    batch, width = label.shape[0], label.shape[1] + 1
    shape = "[rows, V], because packed_input=True" if is_packed else f"[{batch}, T, {width}, V]"
    fits = x.dim() == 2 if is_packed else x.dim() == 4 and x.shape[::2] == (batch, width)
    if not fits or x.shape[-1] == 0:
        raise ValueError(
            f"{_NAME}: x must have shape {shape}, for label {list(label.shape)}, got "
            f"{list(x.shape)}."
        )
    if not 0 <= blank < x.shape[-1]:
        raise ValueError(
            f"{_NAME}: blank_idx must be a class of x {list(x.shape)}, 0 to {x.shape[-1] - 1}, got "
            f"{blank}."
        )
