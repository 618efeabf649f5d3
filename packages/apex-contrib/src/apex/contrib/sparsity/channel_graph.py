"""A traced network as a table of facts, a node a row: what Apex's methods of permutations work on.

The rules decide what may be permuted; the facts tell it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from .channel_rules import ChannelRules
from .channel_spaces import Attended, Channels, Use
from .channel_views import Held
from .over_processes import Share


def node_name_matches(node_name: str, module_name: str) -> bool:
    """Whether both are the same but for punctuation, case, and ``module.`` in front."""
    plain = ["".join(filter(str.isalnum, name)).lower() for name in (node_name, module_name)]
    return len({name.removeprefix("module") for name in plain}) == 1


def get_node_parent_children(fx_node: fx.Node) -> tuple[list[str], list[str]]:
    """Names of a node's inputs and users."""
    return [n.name for n in fx_node.all_input_nodes], [n.name for n in fx_node.users]


class Tracer(fx.Tracer):
    """Takes modules of Apex as they are, as it does those of torch."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_ours = type(m).__module__.startswith("apex.")
        return is_ours or super().is_leaf_module(m, module_qualified_name)


class ChannelGraph(dict[str, dict[str, Any]]):
    """Facts of each node, by its name: strings, numbers, truth values, and lists of these.

    Each step of :class:`apex.contrib.sparsity.permutation_lib.Permutation` adds some.

    Args:
        rules: a network's graph, read.

    Attributes:
        permutations: by the number of a space, the order of its channels that a search has found,
            or None where it gains nothing.
        matrices: by the number of a space, the magnitudes to search; None if they are not there.
        share: what this process has found, until all have told each other.
    """

    def __init__(self, rules: ChannelRules) -> None:
        super().__init__()
        self.rules = rules
        self.permutations: dict[int, list[int] | None] = {}
        self.matrices: dict[int, Tensor] | None = None
        self.share: Share | None = None
        self._nodes = {node.name: node for node in rules.graph.nodes}
        for name, node in self._nodes.items():
            parents, children = get_node_parent_children(node)
            self[name] = {
                "op": node.op,
                "target": str(node.target),
                "parents": parents,
                "children": children,
            }

    @staticmethod
    def traced(model: nn.Module) -> tuple[fx.Graph, list[fx.Graph], dict[str, Tensor]]:
        """Trace a network as it is, and as it is in training and in evaluation.

        Returns:
            Its graph, those of the other modes that differ from it, and by their names in graphs
            the tensors that its code makes. The network itself is left as it was.
        """
        modes = {module: module.training for module in model.modules()}
        graphs: list[fx.Graph] = []
        constants: dict[str, Tensor] = {}
        present = set(vars(model))
        try:
            for mode in (None, True, False):
                for module, own in modes.items():
                    module.training = own if mode is None else mode
                graphs.append(Tracer().trace(model))
        finally:
            for module, own in modes.items():
                module.training = own
            for name in set(vars(model)) - present:  # torch.fx keeps constants there
                constants[name] = vars(model).pop(name)
        first = str(graphs[0])
        return graphs[0], [graph for graph in graphs[1:] if str(graph) != first], constants

    def find(self, name: str) -> str:
        """The node of a name, which may be that of its module.

        Raises:
            KeyError: there is none.
        """
        for own, facts in self.items():
            if name == own or name == facts["target"]:
                return own
        for own, facts in self.items():
            if node_name_matches(name, own) or node_name_matches(name, facts["target"]):
                return own
        raise KeyError(f"{name!r} is no node of the network: {', '.join(self)}")

    def module_of(self, name: str) -> nn.Module | None:
        """The module that a node calls."""
        if self[name]["op"] != "call_module":
            return None
        return self.rules.model.get_submodule(self[name]["target"])

    def tensors_of(self, name: str) -> list[Tensor]:
        """Parameters and buffers of a node: its module's own, or those that a function is given."""
        module, node = self.module_of(name), self._nodes.get(name)
        if module is not None:
            return [
                t
                for t in (*module._parameters.values(), *module._buffers.values())
                if t is not None and not is_lazy(t)
            ]
        inputs: Iterable[fx.Node] = () if node is None else (node, *node.all_input_nodes)
        held = [self.rules.values[n] for n in inputs]
        return [value.tensor for value in held if isinstance(value, Held)]

    def uses_of(self, name: str, dim: int) -> list[Use]:
        """Those of a node's tensors whose dimension ``dim`` has known channels."""
        uses = (self.rules.spaces.use_of(tensor, dim) for tensor in self.tensors_of(name))
        return [use for use in uses if use is not None]

    def all_uses_of(self, name: str) -> list[Use]:
        """Those of all dimensions."""
        most = max((tensor.dim() for tensor in self.tensors_of(name)), default=0)
        return [use for dim in range(most) for use in self.uses_of(name, dim)]

    def spaces_read(self, name: str) -> list[int]:
        """The spaces in a node's dimension C: more than one where it reads a concatenation."""
        return self._roots_of(use for use in self.all_uses_of(name) if use.reads)

    def spaces_made(self, name: str) -> list[int]:
        """The spaces in a node's dimension K."""
        node = self._nodes.get(name)
        value = None if node is None else self.rules.values[node]
        if isinstance(value, Attended):
            return []  # its output projection is a node of its own
        if isinstance(value, Channels):
            return self._roots(value.spaces)
        return self._roots_of(use for use in self.all_uses_of(name) if not use.reads)

    def _roots_of(self, uses: Iterable[Use]) -> list[int]:
        return self._roots(space for use in uses for space, _ in use.parts)

    def _roots(self, spaces: Iterable[int]) -> list[int]:
        return list(dict.fromkeys(self.rules.spaces.root(space) for space in spaces))

    def channels(self) -> list[tuple[str, int, list[tuple[int, int]]]]:
        """The names of tensors, and whose channels each of their dimensions has."""
        return [(use.name, use.dim, use.parts) for use in self.rules.spaces.uses()]

    def frozen(self, spaces: Iterable[int]) -> str | None:
        """Why some of these spaces must not be permuted; None if all may."""
        return next(filter(None, (self.rules.spaces[space].frozen for space in spaces)), None)

    def order_of(self, name: str, dim: int) -> list[int]:
        """The order of a node's channels by what was found; empty where they stay."""
        found = {s: p for s, p in self.permutations.items() if p is not None}
        for use in self.uses_of(name, dim):
            order = self.rules.spaces.new_order(use, found)
            if order is not None:
                return order.tolist()
        return []
