"""Operators that write to their arguments: how autograd learns of it, and compilers do not.

torch's own in-place functions raise the version of the tensors that they write. The version shows a
backward pass that a value which it saved has changed. They also refuse tensors whose gradient they
cannot give.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def register_writes(library: torch.library.Library, overload: Any) -> None:
    """Let ``overload``, if it writes to arguments, raise their versions, however it is called.

    In grad mode it then refuses to write to tensors that require a gradient: it has no formula for
    one.
    """
    if not _written(overload):
        return

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        written = list(_written_tensors(overload, args, kwargs))
        if torch.is_grad_enabled():
            _refuse_gradients(overload, written)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = overload.redispatch(
                keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs
            )
        torch.autograd.graph.increment_version([tensor for _, tensor in written])
        return result

    name = overload.name().partition("::")[2]
    library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


def call_counted(overload: Any, *args: Any) -> Any:
    """Call an operator that writes to its arguments, and raise their versions.

    The operator does the same by itself, but needs twice the time for long lists, which then pass
    through Python twice. Tensors that require a gradient are written to in any mode, as under
    ``torch.no_grad()``.
    """
    if torch.compiler.is_compiling():  # what is traced there has no versions
        return overload(*args)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        result = overload._op(*args)  # without a frame of torch's
    tensors: list[Tensor] = []
    for position, _ in _written(overload):
        value = args[position] if position < len(args) else None
        tensors += [value] if isinstance(value, Tensor) else value or ()
    torch.autograd.graph.increment_version(tensors)
    return result


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Within, operators leave versions alone: the caller raises them, for all of a step at once."""
    if torch.compiler.is_compiling():  # what is traced there has no versions
        return contextlib.nullcontext()
    return torch._C._AutoDispatchBelowADInplaceOrView()


@functools.cache
def _written(overload: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the schema says is written to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written_tensors(overload: Any, args: tuple, kwargs: dict) -> Iterator[tuple[str, Tensor]]:
    for position, name in _written(overload):
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            yield name, value
        elif value is not None:
            for tensor in value:
                yield name, tensor


def _refuse_gradients(overload: Any, written: list[tuple[str, Tensor]]) -> None:
    for name, tensor in written:
        if tensor.requires_grad:
            raise RuntimeError(
                f"{overload.name()}: a tensor of {name} requires a gradient, and this operator, "
                "which writes to it, has no formula for one. Call it under torch.no_grad(), or "
                "give it detached tensors."
            )


def keep_from_tracing(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Let torch.compile call ``step`` instead of looking into it, as it does torch's fused ones.

    A step is one operator per bucket: there is nothing to fuse, and step counts would make it
    compile anew at each. Not a decorator, because that would import the compiler with the package.
    """
    if not getattr(optimizer_class.step, "_torchdynamo_disable", False):
        optimizer_class.step = torch.compiler.disable(optimizer_class.step)  # type: ignore[method-assign]
