"""Optimizers that update all parameters of one device and dtype in a single launch."""

from importlib import import_module as _import_module
from sys import argv as _argv
from typing import TYPE_CHECKING

if _argv[:1] == ["-m"]:  # the doctor may be asked, which answers without torch too
    from ._shared.native.doctor_torch import answer_without_torch as _answer

    _answer(__name__)

if TYPE_CHECKING:
    from .cpu_offload import CPUOffload
    from .fused_adagrad import FusedAdagrad
    from .fused_adam import FusedAdam
    from .fused_lamb import FusedLAMB
    from .fused_lars import FusedLARS
    from .fused_mixed_precision_lamb import FusedMixedPrecisionLamb
    from .fused_novograd import FusedNovoGrad
    from .fused_sgd import FusedSGD

__all__ = [
    "CPUOffload",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedLARS",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
# Each is imported when it is asked for: a script that uses one does not wait for all.
_MODULES = {
    "CPUOffload": "cpu_offload",
    "FusedAdagrad": "fused_adagrad",
    "FusedAdam": "fused_adam",
    "FusedLAMB": "fused_lamb",
    "FusedLARS": "fused_lars",
    "FusedMixedPrecisionLamb": "fused_mixed_precision_lamb",
    "FusedNovoGrad": "fused_novograd",
    "FusedSGD": "fused_sgd",
}


def __getattr__(name: str):
    """Import an optimizer, or the module of one, on first use."""
    if name in _MODULES:
        value = getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES.values():
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_MODULES.values()})
