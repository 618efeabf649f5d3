"""Mixed-precision training: opt levels, loss scaling, and casts that can be switched off."""

from sys import argv as _argv
from typing import TYPE_CHECKING

if _argv[:1] == ["-m"]:  # the doctor may be asked, which answers without torch too
    from ._shared.native.doctor_torch import answer_without_torch as _answer

    _answer(__name__)

from . import _moved
from .__version__ import VERSION, __version__
from ._amp_state import _amp_state, master_params
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

del _moved  # importing it is enough

if TYPE_CHECKING:
    from .debugging.watch import debug

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


def __getattr__(name: str):
    """Import ``debug`` on first use: few scripts use it."""
    if name != "debug":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .debugging.watch import debug

    globals()["debug"] = debug
    return debug


def __dir__() -> list[str]:
    return sorted({*globals(), "debug"})
