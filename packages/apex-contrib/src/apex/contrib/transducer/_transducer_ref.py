"""Apex's reference functions, in plain PyTorch: for tests of those who have their own kernels."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["transducer_joint_reference", "transducer_loss_reference"]


def transducer_loss_reference(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank_idx: int, loss_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return alpha, beta, the gradient of ``x`` and the loss; see :class:`TransducerLoss`."""
    x = x.detach().requires_grad_()
    logs = x.log_softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
    alpha, beta = (logs.new_zeros(logs.shape[:3]) for _ in range(2))
    losses = []
    for b, (frames, labels) in enumerate(zip(f_len.tolist(), y_len.tolist(), strict=True)):
        if frames == 0:
            losses.append(logs[b].sum() + (float("inf") if labels else 0.0))
            continue
        blanks = logs[b, :, :, blank_idx]
        moves = logs[b, :, :labels].gather(
            -1, label[b, :labels].long()[None, :, None].expand(logs.shape[1], -1, 1)
        )[..., 0]
        forward = _ways(blanks[:frames, : labels + 1], moves[:frames])
        # The same from the other end: what leads from a cell to the last, and its blank.
        last = blanks[frames - 1, labels]
        flipped = blanks[:frames, : labels + 1].flip(0, 1)
        shifted = torch.cat((flipped[1:], flipped[:1]))  # a blank is of the cell that is left
        backward = _ways(shifted, moves[:frames].flip(0, 1)) + last
        alpha[b, :frames, : labels + 1] = forward.detach()
        beta[b, :frames, : labels + 1] = backward.flip(0, 1).detach()
        losses.append(-(forward[-1, -1] + last))
    loss = torch.stack(losses).to(x.dtype) if losses else x.new_zeros(0)
    (gradient,) = torch.autograd.grad(loss, x, loss_grad.to(loss.dtype))
    return alpha, beta, gradient, loss.detach()


def _ways(stay: Tensor, move: Tensor) -> Tensor:
    """``[T, U]``: logarithms of the sums over all ways from the first cell to each.

    ``stay[t - 1, u]`` leads to ``[t, u]``, and so does ``move[t, u - 1]``.
    """
    frames, width = stay.shape
    cells = [[stay.new_zeros(())] * width for _ in range(frames)]
    for t in range(frames):
        for u in range(width):
            ways = [cells[t - 1][u] + stay[t - 1, u]] if t else []
            ways += [cells[t][u - 1] + move[t, u - 1]] if u else []
            if ways:
                cells[t][u] = torch.stack(ways).logsumexp(0)
    return torch.stack([torch.stack(row) for row in cells])


def transducer_joint_reference(
    f: Tensor,
    g: Tensor,
    h_grad: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    pack_output: bool,
    relu: bool,
    dropout: bool,
    dropout_prob: float = 0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the joint and the gradients of ``f`` and ``g``; see :class:`TransducerJoint`.

    ``h_grad`` and ``mask`` are ``[B, T, U, H]``, also with ``pack_output``, which packs the joint.

    Raises:
        NotImplementedError: dropout without its mask.
    """
    if dropout and mask is None:
        raise NotImplementedError("transducer_joint_reference: dropout=True needs its mask.")
    f, g = f.detach().requires_grad_(), g.detach().requires_grad_()
    frames = torch.arange(f.shape[1], device=f.device)[None, :, None]
    labels = torch.arange(g.shape[1], device=g.device)[None, None, :]
    is_inside = (frames < f_len[:, None, None]) & (labels < g_len[:, None, None])
    h = f[:, :, None] + g[:, None]
    if relu:
        h = h.relu()
    if dropout:
        h = h * mask / (1 - dropout_prob)
    h_grad = torch.where(is_inside[..., None], h_grad, 0)
    f_grad, g_grad = torch.autograd.grad(h, (f, g), h_grad)
    h = h.detach()
    # Boolean indices give the cells inside in the order of packed rows.
    h = h[is_inside] if pack_output else torch.where(is_inside[..., None], h, -1)
    return h, f_grad, g_grad
