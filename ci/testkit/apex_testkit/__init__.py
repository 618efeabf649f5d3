"""Oracles, fixtures, grids and the benchmark runner of Apex's tests; never part of a wheel."""

from .accuracy import assert_as_accurate_as, assert_same_bits
from .devices import runs_gpu_kernels
from .grids import FLOATS, HALVES, LARGE, LAYOUTS, SEVERAL_CHUNKS, SHAPES
from .opcheck import assert_compiles, opcheck_samples

__all__ = [
    "FLOATS",
    "HALVES",
    "LARGE",
    "LAYOUTS",
    "SEVERAL_CHUNKS",
    "SHAPES",
    "assert_as_accurate_as",
    "assert_compiles",
    "assert_same_bits",
    "opcheck_samples",
    "runs_gpu_kernels",
]
