"""Searches for orders of columns that lose little when two of every four are pruned."""

try:
    import numpy  # noqa: F401
except ImportError as error:
    raise ImportError(
        "apex.contrib.sparsity: searches for channel permutations need NumPy. Install it with `pip "
        "install apex-contrib[sparsity]`, or prune without them (allow_permutation=False)."
    ) from error

from .call_permutation_search_kernels import accelerated_search_for_good_permutation
from .permutation_utilities import sum_after_2_to_4

__all__ = ["accelerated_search_for_good_permutation", "sum_after_2_to_4"]
