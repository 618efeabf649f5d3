"""Apex's reference functions, in plain PyTorch: for tests of those who have their own kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .loss import arguments_of
from .transducer_joint import plain as joint
from .transducer_loss import plain as loss

__all__ = ["transducer_joint_reference", "transducer_loss_reference"]


def transducer_loss_reference(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank_idx: int, loss_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return alpha, beta, the gradient of ``x`` and the loss; see :class:`TransducerLoss`."""
    x = x.detach().requires_grad_()
    losses, *_, alpha, beta = loss.transducer_loss(
        *arguments_of(x, label, f_len, y_len, blank_idx, None)
    )
    (gradient,) = torch.autograd.grad(losses, x, loss_grad.to(losses.dtype))
    return alpha.detach(), beta.detach(), gradient, losses.detach()


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

    Raises:
        NotImplementedError: dropout without its mask.
    """
    if dropout and mask is None:
        raise NotImplementedError("transducer_joint_reference: dropout=True needs its mask.")
    f, g = f.detach().requires_grad_(), g.detach().requires_grad_()
    f_len, g_len = f_len.long(), g_len.long()
    ends = torch.cumsum(f_len * g_len, 0) if pack_output else None
    rows = int(ends[-1]) if pack_output and len(ends) else 0
    keep = mask.bool() if dropout else None
    scale = 1 / (1 - dropout_prob) if dropout else 1.0
    h = joint.transducer_joint(f, g, f_len, g_len, keep, ends, rows, relu, scale)
    return h.detach(), *torch.autograd.grad(h, (f, g), h_grad)
