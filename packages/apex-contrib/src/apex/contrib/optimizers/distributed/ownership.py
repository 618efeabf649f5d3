"""Which sharded optimizer a parameter belongs to: the newest one that was built over it.

Such an optimizer takes gradients away and overwrites parameters from masters of its own, so two of
them cannot share a parameter. An older one may well be alive when the next is built, because a
scheduler holds it. It loses its hooks then, and says so when it is used.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .collectives import refuse_together

# No lock on either: the constructors that write are collective, and run in one thread.
_OWNERS = WeakTensorKeyDictionary()  # parameter -> weak reference to its optimizer
_LISTENING: list[Any] = []  # the handle of the hook that steps of all optimizers call


def former_owners(optimizer: Any, params: Iterable[Tensor]) -> list[Any]:
    """Other optimizers, still alive, that parameters belong to; each once."""
    refs = (_OWNERS.get(param) for param in params)
    found = {id(owner): owner for ref in refs if ref is not None and (owner := ref()) is not None}
    found.pop(id(optimizer), None)
    return list(found.values())


def check_free(
    optimizer: Any, params: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Have former owners finish what is under way, before parameters change; a collective call.

    Raises:
        RuntimeError: on every rank, if a former owner holds gradients that no step has used.
    """
    formers, error = former_owners(optimizer, params), None
    holding = [former for former in formers if former._holds_gradients()]
    if holding:
        error = RuntimeError(
            f"{type(optimizer).__name__}: params belong to a {type(holding[0]).__name__} that "
            "holds gradients which no step has used. They would be lost: call its step() or its "
            "zero_grad() before you build another optimizer over its parameters."
        )
    refuse_together(error, group, device, type(optimizer).__name__)
    for former in formers:
        former._finish_under_way()


def claim(optimizer: Any, params: Sequence[Tensor], handles: Iterable[Any]) -> None:
    """Make an optimizer the owner of parameters; former owners lose all of theirs.

    Args:
        handles: of the hooks that the parameters call for the owner.
    """
    for former in former_owners(optimizer, params):
        former._successor = type(optimizer).__name__
        for handle in former._hook_handles:
            handle.remove()
    owner = weakref.ref(optimizer)
    if not _LISTENING:
        _LISTENING.append(register_optimizer_step_pre_hook(_refuse_idle))
    optimizer._hook_handles.extend(handles)
    for param in params:
        _OWNERS[param] = owner


def _refuse_idle(optimizer: Any, *unused: Any) -> None:
    """Raise RuntimeError if all gradients of an optimizer of another kind are with an owner.

    It would step on nothing, without a word. An optimizer with a gradient is let through at once.
    """
    if torch.compiler.is_compiling() or hasattr(optimizer, "_successor"):
        return
    groups = optimizer.param_groups
    if any(param.grad is not None for group in groups for param in group["params"]):
        return
    params = [param for group in groups for param in group["params"]]
    for owner in former_owners(optimizer, params):
        if owner._holds_gradients():
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: no parameter has a gradient, because a "
                f"{type(owner).__name__} over them has taken all as they came. Step that one; or "
                "delete it, with all that refers to it, such as a scheduler, before the backward."
            )


def check_owner(optimizer: Any, call: str) -> None:
    """Raise RuntimeError if another optimizer has taken over parameters of this one."""
    if optimizer._successor is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__}.{call}: parameters of this optimizer belong to a newer "
            f"{optimizer._successor}, which was built over them: it takes their gradients, and "
            "steps masters of its own. Use that one; a parameter can have one such optimizer only."
        )


def check_complete(optimizer: Any, call: str) -> None:
    """Raise RuntimeError if a state to be saved is partly in parameters that another one steps."""
    if optimizer.store_param_remainders and optimizer._successor is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__}.{call}: parameters of this optimizer belong to a newer "
            f"{optimizer._successor}. With store_param_remainders=True they are half of this "
            "state, so it is lost. Save the state before you build another optimizer."
        )


def check_sole_reducer(optimizer: Any, param: Tensor) -> None:
    """Raise RuntimeError if torch's DistributedDataParallel has reduced a gradient, too.

    It copies gradients, and writes its averages to ``param.grad`` at the end of the pass, from
    where they would be reduced once more. So a gradient is there again, although autograd has not
    added to it since it was taken. A script may have put it there as well: then it belongs to what
    is reduced, and the search, which looks at all objects, is not repeated.
    """
    if id(param) not in optimizer.taken or optimizer.is_sole_reducer:
        return
    wrappers = [
        each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)
    ]
    if not any(param is own for wrapper in wrappers for own in wrapper.parameters()):
        optimizer.is_sole_reducer = True
        return
    raise RuntimeError(
        f"{type(optimizer).__name__}: torch's DistributedDataParallel reduces the gradient of a "
        f"parameter of shape {list(param.shape)}, too, so that both would be added up. Do not wrap "
        "the model: this optimizer reduces its gradients. Or give the optimizer "
        "overlap_grad_sync=False, or run each backward within the wrapper's no_sync()."
    )
