"""The transducer_joint operators: schemas, documentation and fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._ops import library
from ..._shared.native.fakes import expect


@library.define(
    "transducer_joint_forward(Tensor f, Tensor g, Tensor f_len, Tensor g_len, Tensor? keep, "
    "Tensor? batch_offset, int packed_batch, bool relu, float scale) -> Tensor h"
)
def transducer_joint_forward(
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    keep: Tensor | None,
    batch_offset: Tensor | None,
    packed_batch: int,
    relu: bool,
    scale: float,
) -> Tensor:
    """``h(t, u) = f(t) + g(u)`` for the cells of every sample; -1 in cells outside.

    Args:
        f: ``[B, T, H]``; g: ``[B, U, H]``; both contiguous, of one dtype.
        f_len, g_len, batch_offset: ``[B]`` int64. With ``batch_offset`` the result is packed.
        keep: bool, shaped as the result: other elements are 0. packed_batch: rows if packed.
        relu: negative sums become 0. scale: multiplies what is kept, if ``keep`` is given.

    Returns:
        ``[B, T, U, H]``, or packed ``[packed_batch, H]``.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or on a CPU lengths. On a GPU samples
            whose lengths do not fit are outside.
    """
    if batch_offset is not None:
        expect(packed_batch >= 0, f"packed_batch must not be negative, got {packed_batch}.")
        return f.new_empty(packed_batch, f.shape[2])
    return f.new_empty(*f.shape[:2], *g.shape[1:])


@library.define(
    "transducer_joint_backward(Tensor dh, Tensor f, Tensor g, Tensor f_len, Tensor g_len, "
    "Tensor? keep, Tensor? batch_offset, int packed_batch, bool relu, float scale)"
    " -> (Tensor df, Tensor dg)"
)
def transducer_joint_backward(
    dh: Tensor,
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    keep: Tensor | None,
    batch_offset: Tensor | None,
    packed_batch: int,
    relu: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`transducer_joint_forward`, summed in float32 at least, in one order.

    ``f`` and ``g`` say where ReLU passes a gradient; without it their shapes alone are read.
    """
    return torch.empty_like(f), torch.empty_like(g)
