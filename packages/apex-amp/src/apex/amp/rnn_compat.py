"""Lets scripts replace torch's recurrent functions; amp itself casts those elsewhere.

Under O1 and O4 recurrent layers and cells run in 16 bits by rules of torch's dispatcher
(:mod:`.casting.rules`), which see cuDNN's flat weights, too.
"""

from __future__ import annotations

from . import utils, wrap
from .casting.rnn_functions import RNN_NAMES, VariableFunctionsShim, replaceable_functions
from .handle import AmpHandle

__all__ = ["RNN_NAMES", "VariableFunctionsShim", "has_old_rnns", "whitelist_rnn_cells"]


def has_old_rnns() -> bool:
    """Whether torch has the recurrent backend of before 1.0: no."""
    return False


def whitelist_rnn_cells(cast_fn: utils.Cast, handle: AmpHandle, verbose: bool = False) -> None:
    """Wrap the functions of torch's recurrent cells by :func:`.wrap.make_cast_wrapper`.

    Args:
        cast_fn: such as :func:`apex.amp.utils.maybe_half`.
        handle: decides whether to cast, and keeps casts of parameters in its cache.
        verbose: print casts.
    """
    functions = replaceable_functions(handle)
    for name in RNN_NAMES:
        wrap.cached_cast(functions, f"{name}_cell", cast_fn, handle, True, verbose)
