"""The namespace that the five Apex wheels share; every wheel ships this file, byte for byte.

It finds subpackages in every folder of the path (``pkgutil`` style: wheels, editable installs and
mixtures), imports them on attribute access (``import apex; apex.amp``), says which wheel to
install for one that is missing, and warns where another project's ``apex`` is mixed in.
"""

import importlib
import os as _os
import sys as _sys
from importlib.util import find_spec as _find_spec
from pkgutil import extend_path as _extend_path

__path__ = _extend_path(__path__, __name__)

# Subpackage: the wheel to install for it. Used for messages only: whatever is installed is found.
_WHEELS = {
    "amp": "apex-amp",
    "fp16_utils": "apex-amp",
    "RNN": "apex-amp",
    "optimizers": "apex-optimizers",
    "multi_tensor_apply": "apex-optimizers",
    "normalization": "apex-normalization",
    "parallel": "apex-parallel",
    "transformer": "apex-parallel",
    "distributed_testing": "apex-parallel",
    "contrib": "apex-contrib",
    "mlp": "apex-contrib",
    "fused_dense": "apex-contrib",
    "fused_bias_swiglu": "apex-contrib",
}


def __getattr__(name: str):
    """Import an installed subpackage on first use."""
    full_name = f"{__name__}.{name}"
    if not name.startswith("_") and _find_spec(full_name) is not None:
        return importlib.import_module(full_name)
    if name not in _WHEELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # `from apex import amp` asks hasattr() before it imports, and would replace any
    # AttributeError by one that does not name the wheel; an ImportError it passes on.
    if _sys._getframe(1).f_code.co_name == "_handle_fromlist":
        raise ModuleNotFoundError(_advice(name), name=full_name)
    raise AttributeError(_advice(name), name=name)


def __dir__():
    from pkgutil import iter_modules

    return sorted({*globals(), *(module.name for module in iter_modules(__path__))})


def _advice(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    wheel = _WHEELS[name]
    try:
        there = version(wheel)
    except PackageNotFoundError:
        return f"apex.{name} is not installed. It is part of {wheel}: pip install {wheel}"
    return (
        f"apex.{name} is not in {wheel} {there}, which is installed; a later release may have it: "
        f"pip install --upgrade {wheel}"
    )


class _MissingWheel:
    """The last finder: gives ``import apex.amp`` a message that names the wheel."""

    @staticmethod
    def find_spec(full_name: str, path=None, target=None):
        package, _, name = full_name.partition(".")
        # importlib.util.find_spec() goes through here too: to that, "not found" is an answer.
        importing = _sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"
        if package == __name__ and name in _WHEELS and importing:
            raise ModuleNotFoundError(_advice(name), name=full_name)


def _warn_of_foreign_files() -> None:
    """Warn where a distribution named apex (NVIDIA's, ROCm's or another) lies in the same path."""
    for site in filter(_os.path.isdir, map(_os.path.dirname, __path__)):
        for entry in _os.listdir(site):
            if entry.startswith(("apex-", "apex.")) and entry.endswith(_METADATA):
                import warnings

                warnings.warn(
                    f"{_os.path.join(site, entry)}: another project's apex is installed besides "
                    "the Apex wheels. Their files mix, and which are imported depends on the order "
                    "of installing. Run `pip uninstall apex`, then install the Apex wheels again "
                    "with `pip install --force-reinstall --no-deps`.",
                    RuntimeWarning,
                    stacklevel=3,
                )


_METADATA = (".dist-info", ".egg-info", ".egg-link")
_warn_of_foreign_files()
if not any(getattr(finder, "__module__", None) == __name__ for finder in _sys.meta_path):
    _sys.meta_path.append(_MissingWheel)
