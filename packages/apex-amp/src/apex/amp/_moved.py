"""Old names of modules that have moved: pickles refer to classes and functions by them."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_PLACES = {
    "apex.amp._checks": "apex.amp.masters.checks",
    "apex.amp._debug": "apex.amp.debugging.watch",
    "apex.amp._debug_report": "apex.amp.debugging.report",
    "apex.amp._forward": "apex.amp.casting.forward",
    "apex.amp._grads": "apex.amp.gradients.backward",
    "apex.amp._masters": "apex.amp.masters.exact",
    "apex.amp._nested": "apex.amp.casting.casts",
    "apex.amp._properties": "apex.amp.casting.levels",
    "apex.amp._rnn_functions": "apex.amp.casting.rnn_functions",
    "apex.amp._stash": "apex.amp.gradients.stash",
    "apex.amp._unscale_python": "apex.amp.gradients.unscale_python",
}


class _OldNames:
    """The last finder: an import by an old name gives the module at its new place."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, _OldNames) if name in _PLACES else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Python makes an empty module, which :meth:`exec_module` replaces."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = importlib.import_module(_PLACES[name])


sys.meta_path.append(_OldNames)
