"""Rows of one matrix, picked by an index, times the rows of another: ``in1[idx1] * in2``."""

from .index_mul_2d import decompositions, index_mul_2d

__all__ = ["decompositions", "index_mul_2d"]
