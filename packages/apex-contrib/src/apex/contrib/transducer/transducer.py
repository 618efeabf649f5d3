"""Apex's names for the joint and the loss of transducers."""

from .joint import TransducerJoint, TransducerJointFunc
from .loss import TransducerLoss, TransducerLossFunc

__all__ = ["TransducerJoint", "TransducerJointFunc", "TransducerLoss", "TransducerLossFunc"]
