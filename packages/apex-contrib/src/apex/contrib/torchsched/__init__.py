"""Inductor's graphs on several streams, as a backend of ``torch.compile`` named ``torchsched``.

``torch.compile`` itself stays as it is until :func:`set_default_backend` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import config
from .backend import DecompositionsWrapper, get_backend
from .ops import layer_norm as _layer_norm  # noqa: F401 registers torch.ops.cudnn.layer_norm

if TYPE_CHECKING:
    from torch import fx

__all__ = ["config", "get_backend", "set_default_backend"]

__torch_compile__ = torch.compile
"""What ``torch.compile`` was when this module was imported; it is put back from here."""

_default_backend: Any = "inductor"


def torchsched(
    model_: fx.GraphModule,
    example_inputs_: Sequence[Any],
    inner_compile: Callable[..., Any] | None = None,
    config_patches: dict[str, Any] | None = None,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    name: str | None = None,
) -> Any:
    """The backend: ``torch.compile(model, backend="torchsched")``.

    The longest path of a graph on CUDA runs on the caller's stream, and what is independent of it
    on other streams. On a CPU the graph is compiled as Inductor does, with these decompositions.

    Args:
        model_: a graph, as Dynamo gives it to a backend.
        example_inputs_: its inputs.
        inner_compile: compiles the parts, which are graphs without gradients; default: Inductor's
            ``compile_fx_inner``.
        config_patches: settings of ``torch._inductor.config``.
        decompositions: more of them, by operator.
        mode: of ``torch.compile``; ``"reduce-overhead"`` raises where the graph is divided.
        options: of ``torch.compile``.
        name: of ``torch.compile``, from torch 2.12 on.

    Raises:
        ValueError: the graph would run on several streams, but ``mode`` or ``options`` ask for
            Inductor's CUDA graphs or its C++ wrapper; or ``config.num_streams`` is less than 1.
    """
    plain = get_backend("torchsched", "dwb")
    backend = DecompositionsWrapper(mode, options, None, plain.decompositions)
    given = {} if name is None else {"compile_region_name": name}
    return backend(
        model_,
        example_inputs_,
        inner_compile=inner_compile,
        config_patches=config_patches,
        decompositions=decompositions,
        **given,
    )


def set_default_backend(backend: Any) -> None:
    """Choose the backend of ``torch.compile`` calls, and of ``Module.compile``, that name none.

    ``torch.compile`` is replaced by :func:`torchsched_compile` for that, and put back when the
    choice is Inductor again.

    Args:
        backend: ``"torchsched"``; ``"inductor"`` or ``"torch"``, which are the same; or another
            name of ``torch.compiler.list_backends(None)``.

    Raises:
        ValueError: another name. Nothing is changed then.
        RuntimeError: somebody else has replaced ``torch.compile`` since this module was imported.
            Nothing is changed then.
    """
    global _default_backend
    chosen = "inductor" if backend == "torch" else backend
    if chosen not in ("inductor", "torchsched"):
        known = ["torch", "torchsched", *torch.compiler.list_backends(None)]
        if chosen not in known:
            raise ValueError(
                f"set_default_backend: backend must be one of {', '.join(dict.fromkeys(known))}; "
                f"got {backend!r}."
            )
    if chosen != "inductor" and torch.compile not in (torchsched_compile, __torch_compile__):
        raise RuntimeError(
            f"set_default_backend: torch.compile is {torch.compile!r}, which somebody has put "
            "there since apex.contrib.torchsched was imported. Call set_default_backend first, or "
            f"name the backend: torch.compile(model, backend={backend!r})."
        )
    _default_backend = torchsched if chosen == "torchsched" else chosen
    if chosen != "inductor":
        torch.compile = torchsched_compile
    elif torch.compile is torchsched_compile:
        torch.compile = __torch_compile__


def torchsched_compile(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
    """``torch.compile`` with the backend of :func:`set_default_backend` where none is given."""
    return __torch_compile__(
        *args, backend=_default_backend if backend is None else backend, **kwargs
    )
