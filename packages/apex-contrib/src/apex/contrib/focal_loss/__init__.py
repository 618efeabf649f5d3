"""Focal loss; ``focal_loss`` of this package is the module, as in Apex."""

from . import focal_loss
from .focal_loss import FocalLoss, decompositions

__all__ = ["FocalLoss", "decompositions", "focal_loss"]
