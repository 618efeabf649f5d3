"""Orders of channels in which 2:4 pruning loses less, applied so that a network computes the same.

Pool & Yu 2021, *Channel Permutations for N:M Sparsity*. The columns of a layer's weight are its
input channels. They may be permuted if whatever makes these channels permutes its rows likewise,
and all that is between, or reads them too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import permutation_steps as steps
from .channel_graph import ChannelGraph, Tracer, get_node_parent_children, node_name_matches
from .channel_rules import ChannelRules
from .channel_spaces import key_of
from .matrix_groups import matrix_groups, retained, weights_of
from .over_processes import everything, gathered, own_share
from .permutation_search_kernels import accelerated_search_for_good_permutation
from .permuted_nodes import SingleNodes
from .permuted_tensors import permute_spaces, replicate_sequence

__all__ = [
    "Permutation",
    "convert_fx_node_name",
    "get_node_parent_children",
    "node_name_matches",
    "replicate_sequence",
]

_MOST_CHANNELS = 2048  # of the exhaustive search
_SWAP_LIMIT_S = 120


def convert_fx_node_name(fx_node_name: str) -> str:
    """A node's name as that of a module: ``layer1_0_conv`` to ``layer1.0.conv``."""
    return fx_node_name.replace("_", ".")


class Permutation(SingleNodes):
    """Finds and applies permutations of one model's channels; all methods are the class's.

    :meth:`permute_model` is all that ASP needs. The other methods are its steps, under the names of
    NVIDIA's Apex and of ROCm's, which is older. A graph is what :meth:`build_fx_graph` returns: a
    dict of facts, a node each.
    """

    _masks: Sequence[Tensor] = ()
    _verbosity = 0
    _seed = 1
    _port = 2341
    _allow = True
    _save_graph = False
    _output_dir = "."
    _search_options: Mapping[str, Any] | None = None
    _stats: tuple[list[str], list[str], list[str]] = ([], [], [])
    _deferred: list[str] | None = None

    # Settings.

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
        sparse_parameters: Iterable[tuple[Any, ...]],
        all_parameters: Iterable[tuple[Any, ...]],
        verbosity: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Say which parameters will be pruned.

        Args:
            model: the network, without a wrapper.
            sparse_parameters: name of the module, name in the module, and the parameter; or Apex's
                tuples, which are the module's name, the module, the parameter's name, the
                parameter, its mask, and what else is pruned of it.
            all_parameters: names and tensors; Apex permutes these, here the network is asked.
            verbosity: 0 is silent, 1 tells totals, 2 everything that is left out, and why.
            optimizer: its state is permuted with its parameters.
        """
        entries = [tuple(entry) for entry in sparse_parameters]
        weights = [entry[2] if len(entry) == 3 else entry[3] for entry in entries]
        cls._model, cls._sparse = model, {key_of(p): p for p in weights}
        cls._masks = [entry[4] for entry in entries if len(entry) > 4]
        cls._verbosity, cls._optimizer = verbosity, optimizer

    # The whole.

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
        cls._stats = ([], [], [])
        if not cls._allow:
            return False
        if cls._save_graph:
            name = os.path.basename(save_dumped_fx_graph)
            dump_fx_graph, save_dumped_fx_graph = True, os.path.join(cls._output_dir, name)
        graph, is_traced = cls.build_offline_permutation_graph(model)
        if graph is None or not is_traced:
            return False
        cls.apply_permutations(graph)
        cls._stats = (*cls._stats[:2], cls.check_graph_for_unpermuted_nodes(graph))
        if dump_fx_graph:
            cls.save_graph_to_json(graph, save_dumped_fx_graph)
        return True

    @classmethod
    def build_offline_permutation_graph(
        cls,
        model: nn.Module,
        dump_fx_graph: bool = False,
        save_dumped_fx_graph: str = "./model_offline_permutation_graph.json",
    ) -> tuple[ChannelGraph | None, bool]:
        """All steps of :meth:`permute_model` but the last: the graph has permutations, not applied.

        Arguments and errors are those of :meth:`permute_model`, and the result is that of
        :meth:`build_fx_graph`.
        """
        graph, _ = cls.build_fx_graph(model)
        groups = None if graph is None else cls.find_matrix_groups(graph)
        signature = groups and {space: tuple(m.shape) for space, m in groups.items()}
        if len({repr(other) for other in gathered(signature)}) > 1:
            raise RuntimeError(
                "Permutation.permute_model: processes have different networks, or prune different "
                "weights of it. Initialize ASP alike on every process."
            )
        if graph is None:
            return None, False
        for step in (
            cls.init_permutation_flags,
            cls.find_real_parents,
            cls.find_real_children,
            cls.make_sibling_coparent_groups,
            cls.fixup_concats,
            cls.enforce_dimension_agreement,
            cls.propagate_permutation_flags,
            cls.search_for_good_permutation,
        ):
            graph = step(graph)
        if dump_fx_graph:
            cls.save_graph_to_json(graph, save_dumped_fx_graph)
        return graph, True

    @classmethod
    def apply_offline_permutation(cls, model: nn.Module, fx_graph: ChannelGraph) -> None:
        """Permute a network by the permutations of a graph, which may be of an equal one.

        Raises:
            ValueError: ``model`` is another network than the graph's. Nothing is changed then.
        """
        graph = fx_graph
        if model is not fx_graph.rules.model:
            graph, _ = cls.build_fx_graph(model)
            if graph is None or graph.channels() != fx_graph.channels():
                raise ValueError(
                    "apply_offline_permutation: model must be the network of fx_graph, or equal to "
                    f"it; got a {type(model).__name__} with other channels."
                )
            graph.permutations = fx_graph.permutations
            cls.init_permutation_flags(graph)
        cls.apply_permutations(graph)

    @classmethod
    def get_permutation_stats(cls) -> tuple[list[str], list[str], list[str]]:
        """What the last call permuted, by name.

        Returns:
            Weights permuted in C, the channels that they read; weights, biases and vectors of norms
            permuted in K, the channels that are made; and dimensions that should have been permuted
            but were not, such as ``"conv1_K"`` of the node conv1. The last is empty: what does not
            fit is found before anything is permuted.
        """
        in_c, in_k, missed = cls._stats
        return list(in_c), list(in_k), list(missed)

    # The network's graph.

    @classmethod
    def build_fx_graph(
        cls,
        model: nn.Module,
        dump_fx_graph: bool = False,
        save_dumped_fx_graph: str = "./model_fx_graph.json",
    ) -> tuple[ChannelGraph | None, bool]:
        """Trace a network, and find what may be permuted; (None, False) if it cannot be traced."""
        try:
            graph, others, constants = ChannelGraph.traced(model)
        except Exception as error:  # whatever the network's own code raises for a proxy
            cls._say(1, f"no permutation: torch.fx cannot trace {type(model).__name__}: {error}")
            return None, False
        rules = ChannelRules(model, graph, others, constants)
        for what in dict.fromkeys(rules.unknown):
            cls._say(2, f"channels that meet {what} are not permuted")
        table = ChannelGraph(rules)
        if dump_fx_graph:
            cls.save_graph_to_json(table, save_dumped_fx_graph)
        return table, True

    @classmethod
    def trace_and_print_raw_fx_graph(
        cls, model: nn.Module, print_tabular: bool = False, generate_python_code: bool = False
    ) -> fx.GraphModule:
        """Trace a network, and print its graph as a list, as a table, or as Python code."""
        traced = fx.GraphModule(model, Tracer().trace(model))
        if print_tabular:
            for node in traced.graph.nodes:
                print(f"{node.op:<14} {node.name:<32} {node.target!s:<48} {node.args}")
        else:
            print(traced.code if generate_python_code else traced.graph)
        return traced

    @classmethod
    def print_raw_fx_graph(
        cls, model: nn.Module, print_tabular: bool = False, generate_python_code: bool = False
    ) -> fx.GraphModule:
        """ROCm's name of :meth:`trace_and_print_raw_fx_graph`."""
        return cls.trace_and_print_raw_fx_graph(model, print_tabular, generate_python_code)

    @classmethod
    def save_graph_to_json(
        cls, graph: Any, save_dumped_graph_path_with_name: str = "./model_fx_graph.json"
    ) -> None:
        """Write a graph, as :meth:`build_fx_graph` gives it, to a file."""
        text = json.dumps(graph, indent=1)
        with open(save_dumped_graph_path_with_name, "w") as file:
            file.write(text)

    # The steps that add facts to a graph.

    init_permutation_flags = staticmethod(steps.init_permutation_flags)
    init_permutation_flag = init_permutation_flags
    init_grouped_conv_permutation_flags = staticmethod(steps.init_grouped_conv_permutation_flags)
    insert_MHA_out_proj = staticmethod(steps.insert_MHA_out_proj)
    find_node_real_children = staticmethod(steps.find_node_real_children)
    find_node_real_parents = staticmethod(steps.find_node_real_parents)
    find_real_children = staticmethod(steps.find_real_children)
    find_real_parents = staticmethod(steps.find_real_parents)
    find_real_siblings = staticmethod(steps.find_real_siblings)
    extract_all_unique_siblings = staticmethod(steps.extract_all_unique_siblings)
    collect_siblings = staticmethod(steps.collect_siblings)
    collect_coparents = staticmethod(steps.collect_coparents)
    propagate_sibling_group = staticmethod(steps.propagate_sibling_group)
    propagate_coparent_group = staticmethod(steps.propagate_coparent_group)
    make_sibling_coparent_groups = staticmethod(steps.make_sibling_coparent_groups)
    fixup_concats = staticmethod(steps.fixup_concats)
    enforce_dimension_agreement = staticmethod(steps.enforce_dimension_agreement)
    propagate_permutation_flags = staticmethod(steps.propagate_permutation_flags)
    check_graph_for_unpermuted_nodes = staticmethod(steps.check_graph_for_unpermuted_nodes)

    @classmethod
    def recursive_find_real_children(cls, node_name: str, fx_graph: ChannelGraph) -> list[str]:
        """The nearest real nodes behind a node: ROCm's form of :meth:`find_node_real_children`."""
        return steps.find_node_real_children(fx_graph, fx_graph.find(node_name), [])

    # Searches.

    @classmethod
    def collect_sparse_weights(
        cls, fx_graph: ChannelGraph, sibling_group: Iterable[str], sibling_group_C_param: int
    ) -> Tensor | None:
        """Magnitudes of the pruned weights of some nodes, below each other; None if none is pruned.

        Returns:
            ``[rows, sibling_group_C_param]``, float32; weights that are wider are cut into runs.
        """
        names = [fx_graph.find(name) for name in sibling_group]
        return weights_of(fx_graph, names, cls._sparse, sibling_group_C_param)

    @classmethod
    def find_matrix_groups(cls, fx_graph: ChannelGraph) -> dict[int, Tensor]:
        """For each space whose permutation can win something, the weights that read it.

        Returns:
            By the number of the space, magnitudes ``[rows, atom]``: all weights below each other,
            and runs of channels that are permuted alike, too. The graph keeps them for the search.
        """
        spaces = fx_graph.rules.spaces

        def skip(space: int, reason: str) -> None:
            cls._say(2, f"{spaces[space].size} channels are not permuted: {reason}")

        fx_graph.matrices = matrix_groups(fx_graph, cls._sparse, skip)
        return fx_graph.matrices

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
        before, after = retained(matrix_group), retained(matrix_group[:, found])
        cls._say(
            2, f"{len(found)} channels: 2:4 pruning keeps {after / before - 1:.2%} more than before"
        )
        return found if after > before else None

    @classmethod
    def find_sibling_group_permutation(
        cls, fx_graph: ChannelGraph, sibling_group_id: int
    ) -> list[int] | None:
        """Search the order of one group's channels; None where there is nothing to win."""
        groups = fx_graph.matrices
        if groups is None:
            groups = cls.find_matrix_groups(fx_graph)
        matrix = groups.get(sibling_group_id)
        if matrix is None:
            return None
        return cls.find_permutation_for_matrix_group(matrix, sibling_group_id)

    @classmethod
    def find_permutations(cls, fx_graph: ChannelGraph) -> ChannelGraph:
        """Search this process' share of the groups; :meth:`sync_permutations` gathers all."""
        groups = fx_graph.matrices
        if groups is None:
            groups = cls.find_matrix_groups(fx_graph)
        fx_graph.share = own_share(
            list(groups), lambda space: cls.find_sibling_group_permutation(fx_graph, space)
        )
        fx_graph.permutations |= fx_graph.share.found
        return fx_graph

    @classmethod
    def sync_permutations(cls, fx_graph: ChannelGraph) -> ChannelGraph:
        """Give each process the permutations that all have found; all must call it.

        Raises:
            RuntimeError: a search failed on one of them; on all.
        """
        if fx_graph.share is not None:
            fx_graph.permutations |= everything(fx_graph.share)
        fx_graph.share = fx_graph.matrices = None
        return fx_graph

    @classmethod
    def search_for_good_permutation(cls, fx_graph: ChannelGraph) -> ChannelGraph:
        """:meth:`find_permutations` and :meth:`sync_permutations`: ROCm's name of both."""
        return cls.sync_permutations(cls.find_permutations(fx_graph))

    @classmethod
    def skip_sibling_group(
        cls, fx_graph: ChannelGraph, sibling_group_id: int, reason: str
    ) -> ChannelGraph:
        """Forbid to permute a group's channels, for a reason that the facts tell then."""
        space = fx_graph.rules.spaces[sibling_group_id]
        space.frozen = space.frozen or reason
        fx_graph.permutations[sibling_group_id] = None
        cls._say(2, f"{space.size} channels are not permuted: {reason}")
        return steps.propagate_permutation_flags(fx_graph)

    @classmethod
    def fetch_C_permutation_sequence_value(
        cls, node_name: str, fx_graph: ChannelGraph
    ) -> list[int]:
        """The order of all input channels of a node that was found; empty where they stay."""
        return fx_graph.order_of(fx_graph.find(node_name), 1)

    @classmethod
    def fetch_K_permutation_sequence_value(
        cls, node_name: str, fx_graph: ChannelGraph
    ) -> list[int]:
        """The order of all output channels of a node that was found; empty where they stay."""
        return fx_graph.order_of(fx_graph.find(node_name), 0)

    # Application.

    @classmethod
    def apply_permutations(cls, fx_graph: ChannelGraph) -> ChannelGraph:
        """Permute all tensors that have channels for which a permutation was found, in place."""
        permutations = {s: p for s, p in fx_graph.permutations.items() if p is not None}
        cls._apply(fx_graph, permutations)
        in_c, in_k, _ = cls._stats
        cls._say(1, f"permuted: {len(in_c)} weights in C, {len(in_k)} tensors in K")
        return fx_graph

    @classmethod
    def permute_sibling_group(
        cls, fx_graph: ChannelGraph, sibling_group_id: int, group_permutation: Sequence[int]
    ) -> bool:
        """Permute a group's channels, wherever they are.

        Args:
            group_permutation: of the channels that are permuted alike, the first run.

        Returns:
            False where the group must not be permuted, or that is no permutation of its channels.
            Nothing is changed then.
        """
        space = fx_graph.rules.spaces[sibling_group_id]
        if space.frozen or sorted(group_permutation) != list(range(space.atom)):
            return False
        fx_graph.permutations[sibling_group_id] = list(group_permutation)
        cls._apply(fx_graph, {sibling_group_id: group_permutation})
        return True

    @classmethod
    def _apply(cls, graph: ChannelGraph, permutations: Mapping[int, Sequence[int]]) -> None:
        moved = permute_spaces(graph.rules, permutations, cls._optimizer)
        own = [use for use in moved if not graph.rules.is_order(use.tensor)]
        in_c, in_k, _ = cls._stats
        in_c = [*in_c, *(use.name for use in own if use.reads)]
        in_k = [*in_k, *(use.name for use in own if not use.reads)]
        cls._stats = (list(dict.fromkeys(in_c)), list(dict.fromkeys(in_k)), [])
        steps.note_permuted(graph, permutations)

    @classmethod
    def transfer_to_dense_mask(cls) -> None:
        """Let the masks that :meth:`set_permutation_params_from_asp` was given keep everything."""
        for mask in cls._masks:
            mask.fill_(True)

    # Messages.

    @classmethod
    def defer_prints(cls) -> None:
        """Keep messages until :meth:`resume_prints`."""
        cls._deferred = cls._deferred or []

    @classmethod
    def resume_prints(cls) -> None:
        """Print what was kept, and everything from now on."""
        kept, cls._deferred = cls._deferred or [], None
        print(*kept, sep="\n", end="\n" if kept else "")

    @classmethod
    def _say(cls, verbosity: int, text: str) -> None:
        if cls._verbosity >= verbosity:
            say = print if cls._deferred is None else cls._deferred.append
            say(f"[ASP] {text}")
