"""What FusedSGD and FusedLARS share: momentum buffers, and launches that write amp's copies."""

from .launches import Launch
from .optimizer import MomentumOptimizer

__all__ = ["Launch", "MomentumOptimizer"]
