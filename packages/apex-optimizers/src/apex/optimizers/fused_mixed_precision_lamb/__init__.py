"""LAMB whose changing numbers live on the device, with float32 masters of 16-bit parameters."""

from .optimizer import FusedMixedPrecisionLamb

__all__ = ["FusedMixedPrecisionLamb"]
