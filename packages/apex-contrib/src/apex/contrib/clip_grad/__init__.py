"""Clipping of gradients by their total norm, in two passes over memory."""

from .clip_grad import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
