"""Attention of sequences of different lengths that are packed one behind the other."""

from .fmha import FMHAFun

__all__ = ["FMHAFun"]
