"""LARS that updates all parameters of one device and dtype in a few launches."""

from .optimizer import FusedLARS

__all__ = ["FusedLARS"]
