"""Passes over a graph before it is differentiated."""

from .pre_grad_passes import pre_grad_custom_pass, register_pattern

__all__ = ["pre_grad_custom_pass", "register_pattern"]
