"""Searches for orders of columns that lose little when two of every four are pruned.

Scripts of Apex put the folder above on ``sys.path`` and import this package by its last name. They
get the same modules then, not copies of them.
"""

import importlib
import pkgutil
import sys

try:
    import numpy  # noqa: F401
except ImportError as error:
    raise ImportError(
        "apex.contrib.sparsity: searches for channel permutations need NumPy. Install it with `pip "
        "install apex-contrib[sparsity]`, or prune without them (allow_permutation=False)."
    ) from error

_NAME = "apex.contrib.sparsity.permutation_search_kernels"

if __name__ == _NAME:
    from .call_permutation_search_kernels import accelerated_search_for_good_permutation
    from .permutation_utilities import sum_after_2_to_4

    __all__ = ["accelerated_search_for_good_permutation", "sum_after_2_to_4"]
else:
    for _part in pkgutil.iter_modules(__path__):
        sys.modules[f"{__name__}.{_part.name}"] = importlib.import_module(f"{_NAME}.{_part.name}")
    sys.modules[__name__] = sys.modules[_NAME]
