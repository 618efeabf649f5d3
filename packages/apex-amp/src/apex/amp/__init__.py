"""Mixed-precision training: opt levels, loss scaling, and casts that can be switched off."""

from .__version__ import VERSION, __version__
from ._amp_state import _amp_state, master_params
from ._debug import debug
from .amp import (
    bfloat16_function,
    float_function,
    half_function,
    init,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, scale_loss

__all__ = [
    "VERSION",
    "__version__",
    "_amp_state",
    "bfloat16_function",
    "debug",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
