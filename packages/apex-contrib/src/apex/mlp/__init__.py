"""Multilayer perceptrons with fused gradients."""

from .mlp import MLP, MlpFunction, decompositions, mlp_function

__all__ = ["MLP", "MlpFunction", "decompositions", "mlp_function"]
