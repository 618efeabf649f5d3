"""torch's recurrent functions in a place where they can be replaced."""

from __future__ import annotations

from typing import Any

import torch

from .. import utils
from ..handle import AmpHandle

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]
"""torch's recurrent functions that amp casts."""


class VariableFunctionsShim:
    """torch's recurrent functions as attributes that may be assigned.

    To use it, put an instance in the place of ``torch.nn.modules.rnn._VF``.
    """

    def __init__(self) -> None:
        for name in RNN_NAMES:
            for suffix in ("", "_cell"):
                setattr(self, name + suffix, getattr(torch, name + suffix))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch._VF, name)  # all that is not recurrent


def replaceable_functions(handle: AmpHandle) -> Any:
    """The shim from which torch's recurrent modules take their functions.

    It is put there if there is none, until ``handle`` is deactivated.
    """
    module = torch.nn.modules.rnn
    if not isinstance(module._VF, VariableFunctionsShim):
        utils.set_func_save(handle, module, "_VF", VariableFunctionsShim())
    return module._VF
