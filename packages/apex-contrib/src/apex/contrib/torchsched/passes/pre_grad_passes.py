"""Replacements in the graph that Dynamo traced, before it is differentiated.

``config.enable_pre_grad_pass`` turns them on, those that ``config.pre_grad_pass_options`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.operator_schemas import normalize_function
from torch.nn import functional as F

from .. import config
from ..ops import layer_norm as _layer_norm  # noqa: F401 registers torch.ops.cudnn.layer_norm

_PATTERNS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def register_pattern(
    name: str, pattern: Callable[..., Any], replacement: Callable[..., Any]
) -> None:
    """Add a replacement, which ``config.pre_grad_pass_options`` turns on by its name.

    Args:
        name: of the replacement.
        pattern: a function of torch that a graph calls.
        replacement: a function that is traced in its place. It takes all arguments of ``pattern``,
            by position, those with defaults too.

    Raises:
        ValueError: the name is taken.
    """
    if name in _PATTERNS:
        raise ValueError(f"register_pattern: {name!r} is registered already.")
    _PATTERNS[name] = (pattern, replacement)


def replace_layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.layer_norm`` by ``torch.ops.cudnn.layer_norm``, where there are weight and bias."""
    if weight is None or bias is None:
        return F.layer_norm(x, normalized_shape, weight, bias, eps)
    return torch.ops.cudnn.layer_norm(x, normalized_shape, weight, bias, eps)[0]


def run_pre_grad_pass(
    name: str, graph: fx.Graph, pattern: Callable[..., Any], replacement: Callable[..., Any]
) -> int:
    """Replace each call of ``pattern`` in a graph, in place.

    Arguments are those of :func:`register_pattern`; ``name`` is for errors.

    Returns:
        How many calls were replaced.

    Raises:
        RuntimeError: ``replacement`` failed for the arguments of a call.
    """
    found = graph.find_nodes(op="call_function", target=pattern)
    for node in found:
        try:
            with graph.inserting_before(node):
                new = _traced(graph, replacement, _in_order(pattern, node))
        except Exception as error:
            raise RuntimeError(
                f"run_pre_grad_pass: replacement {name!r} of {node.format_node()} failed: {error}"
            ) from error
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return len(found)


def pre_grad_custom_pass(graph: fx.Graph) -> None:
    """Make all replacements that ``config.pre_grad_pass_options`` names, in place.

    Raises:
        ValueError: nothing is registered under one of these names. Nothing is changed then.
    """
    names = config.pre_grad_pass_options
    if unknown := [name for name in names if name not in _PATTERNS]:
        raise ValueError(
            f"config.pre_grad_pass_options: {unknown} must be among {list(_PATTERNS)}, or "
            "registered with register_pattern."
        )
    for name in names:
        run_pre_grad_pass(name, graph, *_PATTERNS[name])
    graph.lint()


def _in_order(pattern: Callable[..., Any], node: fx.Node) -> tuple[Any, ...]:
    """All arguments of a call, in the order of the function's parameters."""
    normal = normalize_function(pattern, node.args, node.kwargs, normalize_to_only_use_kwargs=True)
    if normal is None:
        raise TypeError(f"the parameters of {pattern} are not known")
    return tuple(normal.kwargs.values())


def _traced(graph: fx.Graph, replacement: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    """Call a function with proxies of nodes, so that what it does is added to the graph."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    return replacement(*fx.map_arg(args, lambda node: fx.Proxy(node, tracer))).node


register_pattern("cudnn_layer_norm", F.layer_norm, replace_layer_norm)
