"""Orders of channels in which 2:4 pruning loses less, applied so that a network computes the same.

Pool & Yu 2021, *Channel Permutations for N:M Sparsity*. The columns of a layer's weight are its
input channels. They may be permuted if whatever makes these channels permutes its rows likewise,
and all that is between, or reads them too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from .channel_rules import ChannelRules
from .channel_spaces import Channels, Use, key_of
from .over_processes import gathered, shared_search
from .permutation_search_kernels import accelerated_search_for_good_permutation

_MOST_CHANNELS = 2048  # of the exhaustive search
_SWAP_LIMIT_S = 120
_LEAST_GAIN = 1e-3  # of what is retained: less is not worth a search


def convert_fx_node_name(fx_node_name: str) -> str:
    """A node's name as that of a module: ``layer1_0_conv`` to ``layer1.0.conv``."""
    return fx_node_name.replace("_", ".")


def get_node_parent_children(fx_node: fx.Node) -> tuple[list[str], list[str]]:
    """Names of a node's inputs and users."""
    return [n.name for n in fx_node.all_input_nodes], [n.name for n in fx_node.users]


def node_name_matches(node_name: str, module_name: str) -> bool:
    """Whether both are the same but for punctuation, case, and ``module.`` in front."""
    plain = ["".join(filter(str.isalnum, name)).lower() for name in (node_name, module_name)]
    return len({name.removeprefix("module") for name in plain}) == 1


def replicate_sequence(sequence: Sequence[int], replications: int) -> list[int]:
    """A permutation that permutes each of ``replications`` runs of channels like the first."""
    length = len(sequence)
    return [run * length + i for run in range(replications) for i in sequence]


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__.startswith("apex.") or super().is_leaf_module(
            m, module_qualified_name
        )


class Permutation:
    """Finds and applies permutations of one model's channels; all methods are the class's."""

    _sparse: Mapping[Any, Tensor] = MappingProxyType({})
    _optimizer: torch.optim.Optimizer | None = None
    _verbosity = 0
    _seed = 1
    _port = 2341
    _allow = True
    _save_graph = False
    _output_dir = "."
    _search_options: Mapping[str, Any] | None = None
    _stats = (0, 0, 0)

    @classmethod
    def set_identical_seed(cls, identical_seed: int = 1) -> None:
        """Set the seed of searches. Equal seeds find equal permutations on every process.

        Searches have a generator of their own; those of torch and NumPy are not touched.
        """
        cls._seed = identical_seed

    @classmethod
    def reset_seed(cls) -> None:
        """Set the seed back to 1."""
        cls._seed = 1

    @classmethod
    def set_tcpstore_port(cls, tcpstore_port: int) -> None:
        """Kept for Apex's scripts: processes talk by ``torch.distributed``, and need no port."""
        cls._port = tcpstore_port

    @classmethod
    def set_search_options(cls, options: Mapping[str, Any] | None = None) -> None:
        """Choose the search; ours, not Apex's.

        Args:
            options: of :func:`accelerated_search_for_good_permutation`. None: windows of 8 columns
                and 100 escapes up to 2048 channels, and swaps for 120 s above.
        """
        cls._search_options = options

    @classmethod
    def set_permutation_saving_params(
        cls,
        allow_permutation: bool = False,
        save_permutation_graph: bool = False,
        permutation_output_dir: str = ".",
    ) -> None:
        """Allow permutations, and say whether and where :meth:`permute_model` writes its graph."""
        cls._allow, cls._save_graph = allow_permutation, save_permutation_graph
        cls._output_dir = permutation_output_dir

    @classmethod
    def set_permutation_params_from_asp(
        cls,
        model: nn.Module,
        sparse_parameters: Iterable[tuple[str, str, Tensor]],
        all_parameters: Iterable[tuple[str, Tensor]],
        verbosity: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Say which parameters will be pruned.

        Args:
            model: the network, without a wrapper.
            sparse_parameters: name of the module, name in the module, and the parameter.
            all_parameters: names and tensors; Apex permutes these, here the network is asked.
            verbosity: 0 is silent, 1 tells totals, 2 everything that is left out, and why.
            optimizer: its state is permuted with its parameters.
        """
        cls._sparse = {key_of(p): p for _, _, p in sparse_parameters}
        cls._verbosity, cls._optimizer = verbosity, optimizer

    @classmethod
    def permute_model(
        cls,
        model: nn.Module,
        dump_fx_graph: bool = False,
        save_dumped_fx_graph: str = "./model_permutation_graph.json",
    ) -> bool:
        """Search permutations for what :meth:`set_permutation_params_from_asp` named.

        Under ``torch.distributed`` each process must call it; each searches its share. Weights,
        their gradients, and the optimizer's state are permuted in place.

        Returns:
            False where permutations are forbidden, or the network cannot be traced by ``torch.fx``.
            Nothing is changed then.

        Raises:
            RuntimeError: processes have different networks, or a search failed on one of them.
                Nothing is changed then, on any.
        """
        cls._stats = (0, 0, 0)
        if not cls._allow:
            return False
        if cls._save_graph:
            dump_fx_graph = True
            save_dumped_fx_graph = os.path.join(
                cls._output_dir, os.path.basename(save_dumped_fx_graph)
            )
        rules, _ = cls.build_fx_graph(model, dump_fx_graph, save_dumped_fx_graph)
        groups = None if rules is None else cls.find_matrix_groups(rules)
        signature = groups and {space: tuple(m.shape) for space, m in groups.items()}
        if len({repr(other) for other in gathered(signature)}) > 1:
            raise RuntimeError(
                "Permutation.permute_model: processes have different networks, or prune different "
                "weights of it. Initialize ASP alike on every process."
            )
        if rules is None or groups is None:
            return False
        permutations = shared_search(
            list(groups), lambda space: cls.find_permutation_for_matrix_group(groups[space], space)
        )
        cls.apply_permutations(rules, {s: p for s, p in permutations.items() if p is not None})
        return True

    @classmethod
    def get_permutation_stats(cls) -> tuple[int, int, int]:
        """Weights permuted in C, their columns, and in K, their rows, by the last call.

        The third number counts dimensions that should have been permuted but were not. It is 0:
        what does not fit is found before anything is permuted.
        """
        return cls._stats

    @classmethod
    def build_fx_graph(
        cls,
        model: nn.Module,
        dump_fx_graph: bool = False,
        save_dumped_fx_graph: str = "./model_fx_graph.json",
    ) -> tuple[ChannelRules | None, bool]:
        """Trace a network, and find what may be permuted; (None, False) if it cannot be traced."""
        try:
            graph = _Tracer().trace(model)
        except Exception as error:  # whatever the network's own code raises for a proxy
            cls._say(1, f"no permutation: torch.fx cannot trace {type(model).__name__}: {error}")
            return None, False
        rules = ChannelRules(model, graph)
        for what in dict.fromkeys(rules.unknown):
            cls._say(2, f"channels that meet {what} are not permuted")
        if dump_fx_graph:
            cls.save_graph_to_json(_facts(rules), save_dumped_fx_graph)
        return rules, True

    @classmethod
    def find_matrix_groups(cls, rules: ChannelRules) -> dict[int, Tensor]:
        """For each space whose permutation can win something, the weights that read it.

        Returns:
            By the number of the space, magnitudes ``[rows, atom]``: all weights below each other,
            and runs of channels that are permuted alike, too.
        """
        spaces, readers = rules.spaces, dict[int, list[Tensor]]()
        left_out: dict[int, str] = {}
        for use in spaces.uses():
            if use.dim != 1 or key_of(use.tensor) not in cls._sparse:
                continue
            rows = use.tensor.detach().movedim(1, -1).reshape(-1, use.tensor.shape[1])
            begin = 0
            for space, length in use.parts:
                root, atom = spaces.root(space), spaces[space].atom
                if begin % 4:  # its columns are pruned together with others'
                    left_out[root] = f"{use.name} reads them from channel {begin} on"
                part = rows[:, begin : begin + length].reshape(-1, atom)
                readers.setdefault(root, []).append(part.float().abs())
                begin += length
        groups = {}
        for root in spaces.roots():
            space = spaces[root]
            reason = space.frozen or left_out.get(root)
            if reason is None and root not in readers:
                reason = "Dense"
            elif reason is None and (space.atom % 4 or space.atom < 8):
                reason = f"Useless C: {space.atom}"
            elif reason is None and _possible_gain(torch.cat(readers[root])) < _LEAST_GAIN:
                reason = "Not needed"
            if reason is None:
                groups[root] = torch.cat(readers[root])
            else:
                cls._say(2, f"{space.size} channels are not permuted: {reason}")
        return groups

    @classmethod
    def find_permutation_for_matrix_group(
        cls, matrix_group: Tensor, number: int = 0
    ) -> list[int] | None:
        """The best order that the search finds, or None where it keeps nothing more."""
        options = cls._search_options
        if options is None:
            options = {"stripe_group_size": 8, "escape_attempts": 100}
            if matrix_group.shape[1] > _MOST_CHANNELS:
                options = {
                    "strategy": "progressive channel swap",
                    "progressive_search_time_limit": _SWAP_LIMIT_S,
                }
        found = accelerated_search_for_good_permutation(
            matrix_group, {"seed": cls._seed + number} | dict(options), cls._verbosity - 2
        )
        before, after = _retained(matrix_group), _retained(matrix_group[:, found])
        cls._say(
            2, f"{len(found)} channels: 2:4 pruning keeps {after / before - 1:.2%} more than before"
        )
        return found if after > before else None

    @classmethod
    @torch.no_grad()
    def apply_permutations(cls, rules: ChannelRules, permutations: Mapping[int, list[int]]) -> None:
        """Permute all tensors that have the channels of these spaces, in place."""
        orders = [
            (use, rules.spaces.new_order(use, dict(permutations))) for use in rules.spaces.uses()
        ]
        moved = [(use, order) for use, order in orders if order is not None]
        for use, order in moved:
            for tensor in (use.tensor, *cls._companions(use)):
                tensor.copy_(tensor.index_select(use.dim, order.to(tensor.device)))
        columns = sum(use.dim == 1 and key_of(use.tensor) in cls._sparse for use, _ in moved)
        rows = sum(use.dim == 0 and use.tensor.dim() > 1 for use, _ in moved)
        cls._stats = (columns, rows, 0)
        cls._say(1, f"permuted: {columns} pruned weights in C, {rows} weights in K")

    @classmethod
    def _companions(cls, use: Use) -> list[Tensor]:
        """The gradient, and what the optimizer keeps of each element."""
        tensors = [use.tensor.grad] if use.tensor.grad is not None else []
        if cls._optimizer is not None and use.tensor in cls._optimizer.state:
            kept = cls._optimizer.state[use.tensor].values()
            tensors += [t for t in kept if isinstance(t, Tensor) and t.shape == use.tensor.shape]
        return tensors

    @classmethod
    def trace_and_print_raw_fx_graph(
        cls, model: nn.Module, print_tabular: bool = False, generate_python_code: bool = False
    ) -> fx.GraphModule:
        """Trace a network, and print its graph as a list, as a table, or as Python code."""
        traced = fx.GraphModule(model, _Tracer().trace(model))
        if print_tabular:
            for node in traced.graph.nodes:
                print(f"{node.op:<14} {node.name:<32} {node.target!s:<48} {node.args}")
        else:
            print(traced.code if generate_python_code else traced.graph)
        return traced

    @classmethod
    def save_graph_to_json(
        cls, graph: Any, save_dumped_graph_path_with_name: str = "./model_fx_graph.json"
    ) -> None:
        """Write a graph, as :meth:`build_fx_graph` dumps it, to a file."""
        text = json.dumps(graph, indent=1)
        with open(save_dumped_graph_path_with_name, "w") as file:
            file.write(text)

    @classmethod
    def _say(cls, verbosity: int, text: str) -> None:
        if cls._verbosity >= verbosity:
            print(f"[ASP] {text}")


def _retained(matrix: Tensor) -> float:
    fours = matrix.reshape(-1, 4)
    return float(fours.topk(2, dim=1, sorted=False).values.sum(dtype=torch.float64))


def _possible_gain(matrix: Tensor) -> float:
    """How much more than 2:4 pruning of each row would keep if its large values lay anywhere."""
    kept, half = _retained(matrix), matrix.shape[1] // 2
    most = float(matrix.topk(half, dim=1, sorted=False).values.sum(dtype=torch.float64))
    return most / kept - 1 if kept else 0.0


def _facts(rules: ChannelRules) -> dict[str, dict[str, Any]]:
    """What is known of each node, for people: its relatives, its channels, and who may permute."""
    spaces, facts = rules.spaces, {}
    for node, value in rules.values.items():
        parents, children = get_node_parent_children(node)
        fact = {"op": node.op, "target": str(node.target), "parents": parents, "children": children}
        read = [v for v in map(rules.values.get, node.all_input_nodes) if isinstance(v, Channels)]
        for side, channels in (
            ("C", read[:1]),
            ("K", [value] if isinstance(value, Channels) else []),
        ):
            for of in channels:
                roots = [spaces.root(space) for space in of.spaces]
                group = "sibling" if side == "C" else "coparent"
                fact[f"{group}_group_id"] = roots
                reasons = [spaces[root].frozen for root in roots]
                fact[f"{side}_permutable"] = not any(reasons)
                fact[f"{side}_frozen_because"] = next(filter(None, reasons), None)
        facts[node.name] = fact
    return facts
