"""Adagrad that updates all parameters of one device and dtype in a single launch."""

from .optimizer import FusedAdagrad

__all__ = ["FusedAdagrad"]
