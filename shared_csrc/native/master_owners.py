"""Which optimizer steps on a master of a parameter: the newest one that was built over it.

Two masters of one parameter undo each other: every step writes its own into the model. An older
optimizer may well be alive when the next is built, for example while the variable that holds it is
assigned anew; so it is not refused until it is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import apex

# Parameter -> weak reference to its optimizer. Each wheel has a copy of this module, but they share
# a registry, in their namespace. An attribute of the parameter would be in pickles.
# No lock: a race needs two optimizers that are built over one parameter at the same moment.
_OWNERS = vars(apex).setdefault("_master_owners", WeakTensorKeyDictionary())


def claim(optimizer: Any, params: Iterable[Tensor]) -> None:
    """Make an optimizer the owner of parameters; former owners may not be used any more."""
    owner = weakref.ref(optimizer)
    for param in params:
        former = ref() if (ref := _OWNERS.get(param)) is not None else None
        if former is not None and former is not optimizer:
            former._successor = type(optimizer).__name__
        _OWNERS[param] = owner


def check_owner(optimizer: Any, call: str) -> None:
    """Raise RuntimeError if another optimizer has taken over parameters of this one."""
    successor = getattr(optimizer, "_successor", None)
    if successor is not None:
        raise RuntimeError(
            f"{call}: parameters of this optimizer belong to a newer {successor}, which was built "
            "over them. Each steps on masters of its own, and would undo the other's steps. Use "
            "the newer one; for one model, wrap one optimizer with several parameter groups."
        )
