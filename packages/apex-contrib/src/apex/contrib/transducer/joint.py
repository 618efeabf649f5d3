"""The joint of transducers: encodings of frames and of labels, added for every pair of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._shared.native.formula import Formula
from .._shared.native.named_functions import NamedFunction
from .._shared.native.operands import check_floating, exact, is_dtensor
from .._shared.native.plain import explain, plainness
from .cells import are_counts, check_devices, check_lengths
from .transducer_joint import ops, plain

_joint = Formula(
    "TransducerJoint",
    ops.transducer_joint_forward,
    ops.transducer_joint_backward,
    plain.transducer_joint,
    # Not the result: where ReLU passes a gradient, f and g say, and an operation in place may
    # follow.
    saves=("f", "g", "f_len", "g_len", "keep", "batch_offset", "packed_batch", "relu", "scale"),
    grads=("f", "g"),
    rows={"f": 2, "g": 2, "f_len": 0, "g_len": 0, "keep": 3},
)
decompositions = _joint.decompositions
"""The operators in ATen's, for ``ExportedProgram.run_decompositions``: call it."""


class TransducerJoint(nn.Module):
    r"""Sum of the encodings of a frame and of a label, for every pair of them.

    .. math:: h_{tu} = \mathrm{dropout}(\mathrm{relu}(f_t + g_u))

    Args:
        pack_output: leave out the cells that are outside of the samples' lengths.
        relu: set negative sums to 0.
        dropout: in training, set elements to 0 with the probability ``dropout_prob``, and multiply
            the others by ``1 / (1 - dropout_prob)``.
        opt, fwd_tile_size: have no effect; the kernels choose.
        dropout_prob: in ``[0, 1)``.
        probe_mask: keep the list ``mask_probe``, to which each call with ``relu`` or with dropout
            adds its mask: bool, shaped as the result, True where a gradient passes.

    Raises:
        ValueError: ``dropout_prob`` is out of range.

    Source:
        Graves 2012, "Sequence transduction with recurrent neural networks",
        https://arxiv.org/abs/1211.3711; Apex's class of this name.

    Example:
        >>> f, g = torch.randn(2, 5, 16), torch.randn(2, 4, 16)  # 5 frames; 3 labels and one
        >>> lengths = torch.tensor([5, 4]), torch.tensor([4, 3])
        >>> TransducerJoint(relu=True)(f, g, *lengths).shape
        torch.Size([2, 5, 4, 16])
    """

    def __init__(
        self,
        pack_output: bool = False,
        relu: bool = False,
        dropout: bool = False,
        opt: int = 1,
        fwd_tile_size: int = 4,
        dropout_prob: float = 0,
        probe_mask: bool = False,
    ) -> None:
        super().__init__()
        _check_probability(dropout_prob)
        self.pack_output, self.relu, self.dropout = pack_output, relu, dropout
        self.opt, self.fwd_tile_size, self.dropout_prob = opt, fwd_tile_size, dropout_prob
        self.mask_probe: list[Tensor] | None = [] if probe_mask and (relu or dropout) else None

    def forward(
        self,
        f: Tensor,
        g: Tensor,
        f_len: Tensor,
        g_len: Tensor,
        batch_offset: Tensor | None = None,
        packed_batch: int = 0,
    ) -> Tensor:
        """Return the sums.

        Args:
            f: ``[B, T, H]``, float64, float32, float16 or bfloat16; any layout.
            g: ``[B, U, H]``, of the same dtype.
            f_len, g_len: ``[B]`` int32 or int64, how many rows of ``f`` and of ``g`` a sample has.
            batch_offset: with ``pack_output``, ``[B]``: ``cumsum(f_len * g_len)``.
            packed_batch: with ``pack_output``: its last number, or more.

        Returns:
            ``[B, T, U, H]``; packed ``[packed_batch, H]``, samples behind each other, each as
            ``[f_len, g_len, H]``. Cells outside have -1, as in Apex, and no gradient. Gradients are
            added up in float32 at least (float64 for float64), always in the same order.

        Raises:
            TypeError: a dtype is not one of those above, or f's and g's differ.
            ValueError: shapes or devices do not fit, or ``pack_output`` lacks ``batch_offset`` or
                ``packed_batch``.
            RuntimeError: lengths do not fit; on a CPU. On a GPU, where the check would wait for the
                device, such a sample is outside.
        """
        return TransducerJointFunc.apply(
            f,
            g,
            f_len,
            g_len,
            self.pack_output,
            self.relu,
            self.dropout and self.training,
            batch_offset,
            packed_batch,
            self.opt,
            self.fwd_tile_size,
            self.dropout_prob,
            self.mask_probe,
        )


class TransducerJointFunc(NamedFunction):
    """Apex's class of :class:`TransducerJoint`; ``apply`` takes its arguments in Apex's order."""

    @staticmethod
    def apply(
        f: Tensor,
        g: Tensor,
        f_len: Tensor,
        g_len: Tensor,
        pack_output: bool,
        relu: bool,
        dropout: bool,
        batch_offset: Tensor | None,
        packed_batch: int,
        opt: int = 1,
        fwd_tile_size: int = 4,
        dropout_prob: float = 0,
        mask_probe: list | None = None,
    ) -> Tensor:
        """See :meth:`TransducerJoint.forward`."""
        try:
            if (
                not (pack_output or dropout)
                and mask_probe is None
                and (answer := plainness(f, g, f_len, g_len))
                and 0 <= dropout_prob < 1
                and f.dtype is g.dtype
                and are_counts(f_len, g_len)
                and not f.is_meta
            ):
                numbers = f_len.long().contiguous(), g_len.long().contiguous(), None, None
                given = f.contiguous(), g.contiguous(), *numbers, 0, bool(relu), 1.0
                return _joint.plain[answer](*given)
        except (AttributeError, RuntimeError):  # of None, and of the operator's checks
            explain(_check, f, g, f_len, g_len, None)
        _check_probability(dropout_prob)
        packed = (batch_offset, packed_batch) if pack_output else None
        _check(f, g, f_len, g_len, packed)
        ends, rows = packed or (None, 0)
        f_len, g_len, ends = (
            None if t is None else exact(t, torch.int64) for t in (f_len, g_len, ends)
        )
        keep = None
        if dropout:
            shape = (int(rows), f.shape[2]) if pack_output else (*f.shape[:2], *g.shape[1:])
            keep = torch.rand(shape, device=f.device) >= dropout_prob
        scale = 1 / (1 - dropout_prob) if dropout else 1.0
        options = int(rows), bool(relu), scale
        h = _joint(exact(f), exact(g), f_len, g_len, keep, ends, *options)
        if mask_probe is not None and (relu or dropout):
            mask_probe.append(h.detach() > 0 if relu else keep)
        return h


def _check_probability(probability: float) -> None:
    if not 0 <= probability < 1:
        raise ValueError(f"TransducerJoint: dropout_prob must be in [0, 1), got {probability}.")


def _check(
    f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, packed: tuple[Tensor | None, int] | None
) -> None:
    """Raise TypeError or ValueError for what the operators do not take."""
    name = "TransducerJoint"
    check_floating(name, "f", f)
    check_floating(name, "g", g)
    if f.dtype != g.dtype:
        raise TypeError(f"{name}: g is {g.dtype}, but f is {f.dtype}; cast one.")
    if f.dim() != 3:
        raise ValueError(f"{name}: f must have shape [B, T, H], got {list(f.shape)}.")
    if g.dim() != 3 or g.shape[::2] != f.shape[::2]:
        raise ValueError(
            f"{name}: g must have shape [{f.shape[0]}, U, {f.shape[2]}], for f {list(f.shape)}, "
            f"got {list(g.shape)}."
        )
    check_lengths(name, "f_len", f_len, len(f))
    check_lengths(name, "g_len", g_len, len(f))
    ends, rows = packed or (None, 0)
    if packed:
        if ends is None or not 0 <= rows < 2**63:
            raise ValueError(
                f"{name}: pack_output=True needs batch_offset, torch.cumsum(f_len * g_len, 0), and "
                f"packed_batch, its last number; got {ends} and {rows}."
            )
        check_lengths(name, "batch_offset", ends, len(f))
        if is_dtensor(f):
            raise TypeError(f"{name}: pack_output=True takes no DTensor; give f.full_tensor().")
    check_devices(name, "f", f.device, g=g, f_len=f_len, g_len=g_len, batch_offset=ends)
