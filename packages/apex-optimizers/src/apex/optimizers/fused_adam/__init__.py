"""Adam and AdamW that update all parameters of one device and dtype in a single launch."""

from .optimizer import FusedAdam

__all__ = ["FusedAdam"]
