"""Permutations of one node at a time. What fits together is up to the caller, as in Apex."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .channel_graph import ChannelGraph, node_name_matches
from .channel_spaces import key_of
from .permuted_tensors import permute_dims


class SingleNodes:
    """Methods of :class:`Permutation` that permute the tensors of one node of its model."""

    _model: nn.Module | None = None
    _sparse: Mapping[Any, Tensor] = MappingProxyType({})  # by key_of()
    _optimizer: torch.optim.Optimizer | None = None

    @classmethod
    def find_sparse_parameters_for_node(cls, node_name: str) -> list[Tensor]:
        """The weights of a node's module that will be pruned."""
        module = _module_of(cls._model, node_name)
        own = [] if module is None else [p for p in module._parameters.values() if p is not None]
        return [p for p in own if key_of(p) in cls._sparse]

    @classmethod
    def apply_permutation_in_C_dim(
        cls, node_name: str, permutation_sequence: Sequence[int], dryrun: bool = False
    ) -> bool:
        """Permute the columns of one node's weights, and nothing else: not what makes the channels.

        Returns:
            False, and nothing is changed, where there is no such node, or the sequence does not
            fit. With ``dryrun`` nothing is changed at all.
        """
        module = _module_of(cls._model, node_name)
        dims = [] if module is None else _weights_in_C(module)
        return permute_dims(dims, permutation_sequence, dryrun, cls._optimizer)

    @classmethod
    def apply_permutation_in_K_dim(
        cls,
        node_name: str,
        permutation_sequence: Sequence[int],
        fx_graph: ChannelGraph | None = None,
        dryrun: bool = False,
    ) -> bool:
        """Permute the rows of one node's weights, its bias and its statistics, and nothing else.

        A tensor that the network holds by itself is permuted by :meth:`permute_attr`, which needs
        the graph. The result is as of :meth:`apply_permutation_in_C_dim`.
        """
        if fx_graph is not None and fx_graph[fx_graph.find(node_name)]["op"] == "get_attr":
            return cls.permute_attr(node_name, permutation_sequence, fx_graph, dryrun)
        module = _module_of(cls._model, node_name)
        dims = [] if module is None else _tensors_in_K(module)
        return permute_dims(dims, permutation_sequence, dryrun, cls._optimizer)

    @classmethod
    def apply_permutation_in_K_dim_to_children(
        cls,
        fx_graph: ChannelGraph,
        node_name: str,
        permutation: Sequence[int],
        dryrun: bool = False,
    ) -> bool:
        """:meth:`apply_permutation_in_K_dim` for what is behind a node, up to the next real nodes.

        Norms have tensors of these channels; activations have none, and are passed.
        """
        waiting, seen, fits = [fx_graph.find(node_name)], set[str](), True
        while waiting and fits:
            for child in fx_graph[waiting.pop()]["children"]:
                if child in seen or fx_graph[child]["is_real"]:
                    continue
                seen.add(child)
                waiting.append(child)
                if fx_graph.tensors_of(child) and fx_graph[child]["op"] == "call_module":
                    name = fx_graph[child]["target"]
                    fits &= cls.apply_permutation_in_K_dim(name, permutation, fx_graph, dryrun)
        return fits

    @classmethod
    def permute_attr(
        cls,
        node_name: str,
        permutation_sequence: Sequence[int],
        fx_graph: ChannelGraph,
        dryrun: bool = False,
    ) -> bool:
        """Permute a tensor that the network holds by itself in the dimension that has channels."""
        name = fx_graph.find(node_name)
        dims = [(use.tensor, use.dim) for use in fx_graph.all_uses_of(name)]
        return permute_dims(dims, permutation_sequence, dryrun, cls._optimizer)


def _module_of(model: nn.Module | None, node_name: str) -> nn.Module | None:
    """The module whose name a node's name matches; None if there is none."""
    modules = () if model is None else model.named_modules()
    matching = (m for name, m in modules if name and node_name_matches(node_name, name))
    return next(matching, None)


def _weights_in_C(module: nn.Module) -> list[tuple[Tensor, int]]:
    """The tensors of a module that have input channels, and in which dimension."""
    own = [t for name, t in module._parameters.items() if name.endswith("weight")]
    return [(t, 1) for t in own if t is not None and t.dim() > 1]


def _tensors_in_K(module: nn.Module) -> list[tuple[Tensor, int]]:
    """The tensors of a module that have output channels: of attention those of its projection."""
    module = module.out_proj if isinstance(module, nn.MultiheadAttention) else module
    own = (*module._parameters.values(), *module._buffers.values())
    return [(t, 0) for t in own if t is not None and t.dim() > 0]
