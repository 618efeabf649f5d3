"""LAMB that updates all parameters of one device and dtype in two launches."""

from .optimizer import FusedLAMB

__all__ = ["FusedLAMB"]
