"""``amp.debug``: watches models and loss scales for a while, and says what it saw."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._amp_state import _amp_state
from .report import DebugReport, Iteration, ModuleRecord, NonFinite

__all__ = ["debug"]

_ATEN = torch.ops.aten
_MOVES = {_ATEN._to_copy, _ATEN.copy_, _ATEN.clone, _ATEN.detach, _ATEN.lift_fresh}
_MODULE = "apex.amp.module"  # key in the metadata of autograd's nodes


@contextlib.contextmanager
def debug(models: Any = None) -> Iterator[DebugReport]:
    """Watch training in a block: dtypes, the first inf or NaN of each iteration, loss scales.

    Every module's outputs and every gradient in the backward pass are tested, which makes a GPU
    wait each time: use it for a few iterations, not for a whole run. Numbers do not change. It does
    not see inside modules that run compiled.

    Args:
        models: a module or a list of modules; default: those of the last ``amp.initialize``.

    Yields:
        A :class:`~apex.amp.debugging.report.DebugReport`, which fills while the block runs and
        stays valid after it.

    Raises:
        RuntimeError: no models are given and amp is not initialized, or another such block is
            running.
        TypeError: ``models`` is something else.

    Example:
        >>> with amp.debug(model) as report:
        ...     train(model, optimizer, iterations=20)
        >>> print(report)
        >>> report.plot("loss_scale.png")
    """
    if _amp_state.debugger is not None:
        raise RuntimeError("amp.debug: a block of amp.debug is running already.")
    named = _named_models(models)
    report = DebugReport()
    with contextlib.ExitStack() as stack:
        _amp_state.debugger = watch = _Watch(report)
        stack.callback(setattr, _amp_state, "debugger", None)
        for prefix, model in named:
            for name, module in model.named_modules():
                for handle in watch.add((prefix + name).rstrip("."), module):
                    stack.callback(handle.remove)
        yield report


def _named_models(models: Any) -> list[tuple[str, torch.nn.Module]]:
    if models is None:
        found = [reference() for reference in getattr(_amp_state, "models", [])]
        models = [model for model in found if model is not None]
        if not models:
            raise RuntimeError(
                "amp.debug: there are no models to watch. Call amp.initialize first, or pass "
                "them: amp.debug(model)."
            )
    models = list(models) if isinstance(models, (list, tuple)) else [models]
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                "amp.debug: models must be a torch.nn.Module or a list of them, got "
                f"{type(model).__name__}."
            )
    return [(f"models[{i}]." if len(models) > 1 else "", m) for i, m in enumerate(models)]


class _Calls(threading.local):
    """The calls of modules that are under way in this thread, outermost first."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.input_nodes: list[set[Any]] = []
        self.counter: _OpCounter | None = None


class _Watch:
    """Hooks of the watched modules, and what ``scale_loss`` reports."""

    def __init__(self, report: DebugReport) -> None:
        self.report = report
        self._calls = _Calls()
        self._first: NonFinite | None = None

    def add(self, name: str, module: torch.nn.Module) -> tuple[Any, ...]:
        """Put hooks on a module; returns what removes them."""
        dtypes = dict.fromkeys(p.dtype for p in module.parameters(recurse=False))
        self.report.modules[name] = ModuleRecord(name, type(module).__name__, tuple(dtypes))

        def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                self._enter(name, _tensors((args, kwargs)))

        def after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self._leave(name, _tensors(output))

        return (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        )

    def _enter(self, name: str, inputs: list[Tensor]) -> None:
        calls = self._calls
        if not calls.names:
            calls.counter = _OpCounter(self.report, calls.names)
            self._note(name, "forward", inputs, "its input")
            calls.counter.__enter__()
        else:
            parent = calls.names[-1]
            self._note(parent, "forward", inputs, f"in its own code, before it calls {name}")
        calls.names.append(name)
        calls.input_nodes.append({t.grad_fn for t in inputs})
        self.report.modules[name].calls += 1

    def _leave(self, name: str, outputs: list[Tensor]) -> None:
        calls = self._calls
        if not calls.names:
            return  # an exception in a pre-hook before ours
        calls.names.pop()
        inputs = calls.input_nodes.pop()
        if not calls.names:
            calls.counter.__exit__(None, None, None)
        self.report.modules[name].outputs.update(dict.fromkeys((t.dtype for t in outputs), 1))
        self._note(name, "forward", outputs, "its output")
        _tag([t.grad_fn for t in outputs], inputs, name)

    def _note(self, name: str | None, direction: str, tensors: list[Tensor], what: str) -> None:
        """Remember the first inf or NaN of an iteration."""
        if self._first is not None:
            return
        counter = self._calls.counter
        with counter.paused() if counter is not None else contextlib.nullcontext():
            kinds = [kind for t in tensors if (kind := _nonfinite_kind(t)) is not None]
        if kinds:
            self._first = NonFinite(name, direction, kinds[0], what)

    def before_backward(self, loss: Tensor, scaled_loss: Tensor) -> None:
        """Watch all nodes of the graph that the backward pass is going to visit."""
        self._note(None, "forward", [loss], "the loss")
        self._note(None, "forward", [scaled_loss], "the loss times the loss scale")
        seen, pending = set(), [scaled_loss.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            node.register_hook(self._node_hook(node.metadata.get(_MODULE), node.name()))
            pending += [next_node for next_node, _ in node.next_functions]

    def _node_hook(self, name: str | None, operation: str) -> Any:
        def hook(grad_inputs: Any, grad_outputs: Any) -> None:
            self._note(name, "backward", _tensors(grad_inputs), f"a gradient of {operation}")

        return hook

    def after_backward(self, loss_id: int, loss_scale: float, is_skipped: bool) -> None:
        """An iteration has ended."""
        first, self._first = self._first, None
        if is_skipped and first is None:
            first = NonFinite(None, "backward", "inf", "when gradients were added up")
        self.report.iterations.append(Iteration(loss_id, loss_scale, is_skipped, first))


class _OpCounter(TorchDispatchMode):
    """Counts the operations of the innermost module by the dtype of their first tensor."""

    def __init__(self, report: DebugReport, names: list[str]) -> None:
        super().__init__()
        self._report, self._names, self._is_paused = report, names, False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._is_paused and self._names:
            is_move = func.overloadpacket in _MOVES or getattr(func, "is_view", False)
            tensors = [] if is_move else _tensors((args, kwargs or {}))
            if tensors:
                self._report.modules[self._names[-1]].computes[tensors[0].dtype] += 1
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[Tensor]:
    """All floating-point tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _nonfinite_kind(tensor: Tensor) -> str | None:
    """ "inf", "NaN" or None; -inf in a tensor without gradient is taken for a mask."""
    if tensor.is_meta:
        return None
    tensor = tensor.detach() if not tensor.requires_grad else tensor.detach().abs()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if bool(tensor.isnan().any()):
        return "NaN"
    return "inf" if bool(tensor.isposinf().any()) else None


def _tag(nodes: Sequence[Any], inputs: set[Any], name: str) -> None:
    """Write a module's name on the nodes that its call made, unless a submodule's is there."""
    seen, pending = set(inputs), list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        node.metadata.setdefault(_MODULE, name)
        pending += [next_node for next_node, _ in node.next_functions]
