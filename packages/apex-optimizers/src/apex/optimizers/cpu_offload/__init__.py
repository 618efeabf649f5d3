"""Optimizers whose states live on the CPU."""

from .optimizer import CPUOffload

__all__ = ["CPUOffload"]
