"""Focal loss: :func:`focal_loss` and Apex's class of it."""

from .focal_loss import FocalLoss, decompositions, focal_loss

__all__ = ["FocalLoss", "decompositions", "focal_loss"]
