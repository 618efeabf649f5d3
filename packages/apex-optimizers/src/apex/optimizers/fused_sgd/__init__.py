"""SGD with momentum that updates all parameters of one device and dtype in a single launch."""

from .optimizer import FusedSGD

__all__ = ["FusedSGD"]
