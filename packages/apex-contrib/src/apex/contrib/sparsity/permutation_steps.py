"""The steps from a traced network to groups of layers that are permuted alike, as Apex names them.

Each adds facts to a :class:`ChannelGraph`, and most return it. What may be permuted was decided
when the network's operations were read: the steps tell it in Apex's terms, a node at a time. A real
node has a weight that reads or makes channels. A group's number is that of its channels' space.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import gcd

import torch
from torch import nn
from torch.nn import functional as F

from .channel_graph import ChannelGraph

_REAL_FUNCTIONS = {F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def init_permutation_flags(fx_graph: ChannelGraph) -> ChannelGraph:
    """Say of each node what it is, how many channels it has, and what its kind could permute.

    ``C_param`` and ``K_param`` are the channels that it reads and makes, ``groups_param`` is the
    number of a convolution's groups. ``K_passthru``: the channels of its input go through it.
    """
    for name in list(fx_graph):
        facts, module = fx_graph[name], fx_graph.module_of(name)
        is_held = facts["op"] == "get_attr" and bool(fx_graph.tensors_of(name))
        is_real = isinstance(module, (nn.Linear, nn.MultiheadAttention, *_CONVOLUTIONS))
        read, made = fx_graph.spaces_read(name), fx_graph.spaces_made(name)
        is_function = facts["op"] == "call_function" and bool(read)
        facts |= {
            "module_type": type(module).__name__ if module is not None else None,
            "is_real": is_real or is_held or is_function,
            "C_param": _size(fx_graph, read) if read else getattr(module, "in_features", 0),
            "K_param": _size(fx_graph, made),
            "groups_param": getattr(module, "groups", 1),
            "C_permutable": bool(read),
            "K_permutable": bool(made),
            "K_passthru": bool(made) and not (is_real or is_held or is_function),
            "C_permuted": False,
            "K_permuted": False,
            "sibling_group_id": None,
            "coparent_group_id": None,
        }
        if isinstance(module, _CONVOLUTIONS) and module.groups > 1:
            init_grouped_conv_permutation_flags(fx_graph, name, module.groups, 0)
        if isinstance(module, nn.MultiheadAttention):
            insert_MHA_out_proj(fx_graph, name, 0)
    return fx_graph


def init_grouped_conv_permutation_flags(
    fx_graph: ChannelGraph, node_name: str, node_groups: int, verbosity: int
) -> ChannelGraph:
    """Say what a convolution of ``node_groups`` groups could permute.

    Each channel by itself: it is no real node, and what it reads goes through it. Else all groups
    are permuted alike, where a group has a multiple of 4 channels, and more than 4.
    """
    facts, module = fx_graph[node_name], fx_graph.module_of(node_name)
    made, each = module.weight.shape[:2]
    is_depthwise = each == 1 and made == node_groups
    facts |= {"groups_param": node_groups, "C_param": each, "K_param": made}
    facts |= {"is_real": not is_depthwise, "K_passthru": is_depthwise}
    if is_depthwise or each <= 4 or each % 4:
        facts["C_permutable"] = False
        _say(verbosity, f"{node_name}: {node_groups} groups of {each} channels")
    return fx_graph


def insert_MHA_out_proj(fx_graph: ChannelGraph, MHA_node: str, verbosity: int) -> ChannelGraph:
    """Add the output projection of a ``MultiheadAttention`` as a node of its own behind it.

    The attention then has a dimension C alone, and the projection K alone.
    """
    facts, name = fx_graph[MHA_node], f"{MHA_node}_out_proj"
    fx_graph[name] = {
        **facts,
        "op": "call_module",
        "target": f"{facts['target']}.out_proj",
        "module_type": "NonDynamicallyQuantizableLinear",
        "parents": [MHA_node],
        "C_permutable": False,
        "K_permutable": True,
    }
    fx_graph[name]["K_param"] = _size(fx_graph, fx_graph.spaces_made(name))
    for child in facts["children"]:
        parents = fx_graph[child]["parents"]
        fx_graph[child]["parents"] = [name if parent == MHA_node else parent for parent in parents]
    facts |= {"children": [name], "K_permutable": False}
    _say(verbosity, f"{name} is behind {MHA_node}")
    return fx_graph


def find_node_real_children(
    fx_graph: ChannelGraph, node_name: str, found_children: list[str]
) -> list[str]:
    """Add the nearest real nodes behind a node to ``found_children``, each once; return that."""
    return _nearest_real(fx_graph, node_name, "children", found_children)


def find_node_real_parents(
    fx_graph: ChannelGraph, node_name: str, found_parents: list[str]
) -> list[str]:
    """Add the nearest real nodes before a node to ``found_parents``, each once; return that."""
    return _nearest_real(fx_graph, node_name, "parents", found_parents)


def find_real_children(fx_graph: ChannelGraph) -> ChannelGraph:
    """Add ``real_children`` to each node."""
    for name, facts in fx_graph.items():
        facts["real_children"] = find_node_real_children(fx_graph, name, [])
    return fx_graph


def find_real_parents(fx_graph: ChannelGraph) -> ChannelGraph:
    """Add ``real_parents`` to each node."""
    for name, facts in fx_graph.items():
        facts["real_parents"] = find_node_real_parents(fx_graph, name, [])
    return fx_graph


def _nearest_real(graph: ChannelGraph, name: str, side: str, found: list[str]) -> list[str]:
    waiting, seen = list(reversed(graph[name][side])), {name}
    while waiting:
        other = waiting.pop()
        if other in seen:
            continue
        seen.add(other)
        if not graph[other]["is_real"]:
            waiting += reversed(graph[other][side])
        elif other not in found:
            found.append(other)
    return found


def collect_siblings(fx_graph: ChannelGraph, node_name: str, all_siblings: set[str]) -> set[str]:
    """Add a node, and all that must have the same permutation in C, to a set; return that."""
    spaces = set(fx_graph.spaces_read(node_name))
    all_siblings.add(node_name)
    all_siblings.update(n for n in fx_graph if spaces.intersection(fx_graph.spaces_read(n)))
    return all_siblings


def collect_coparents(fx_graph: ChannelGraph, node_name: str, all_coparents: set[str]) -> set[str]:
    """The same of all that must have the same permutation in K."""
    spaces = set(fx_graph.spaces_made(node_name))
    all_coparents.add(node_name)
    all_coparents.update(
        name
        for name, facts in fx_graph.items()
        if facts["is_real"] and spaces.intersection(fx_graph.spaces_made(name))
    )
    return all_coparents


def propagate_sibling_group(
    fx_graph: ChannelGraph, all_siblings: Collection[str], verbosity: int
) -> ChannelGraph:
    """Give siblings their groups, one for each part that they read: a list of numbers.

    One that cannot be permuted in C forbids it to all.
    """
    for name in all_siblings:
        fx_graph[name]["sibling_group_id"] = fx_graph.spaces_read(name) or None
    return _all_or_none(fx_graph, all_siblings, "C_permutable", verbosity)


def propagate_coparent_group(
    fx_graph: ChannelGraph, all_coparents: Collection[str], verbosity: int
) -> ChannelGraph:
    """Give co-parents their groups; one that cannot be permuted in K forbids it to all."""
    for name in all_coparents:
        fx_graph[name]["coparent_group_id"] = fx_graph.spaces_made(name) or None
    return _all_or_none(fx_graph, all_coparents, "K_permutable", verbosity)


def _all_or_none(
    graph: ChannelGraph, names: Collection[str], flag: str, verbosity: int
) -> ChannelGraph:
    forbids = sorted(name for name in names if not graph[name][flag])
    for name in names if forbids else ():
        graph[name][flag] = False
    if forbids:
        _say(verbosity, f"{', '.join(sorted(names))}: not {flag} for {', '.join(forbids)}")
    return graph


def make_sibling_coparent_groups(fx_graph: ChannelGraph) -> ChannelGraph:
    """Give every real node its groups."""
    for side, collect, propagate in (
        ("C_permutable", collect_siblings, propagate_sibling_group),
        ("K_permutable", collect_coparents, propagate_coparent_group),
    ):
        seen: set[str] = set()
        for name, facts in fx_graph.items():
            if facts["is_real"] and facts[side] and name not in seen:
                group = collect(fx_graph, name, set())
                seen |= group
                propagate(fx_graph, group, 0)
    return fx_graph


def extract_all_unique_siblings(fx_graph: ChannelGraph) -> list[set[str]]:
    """All groups of siblings, as sets of names, each once."""
    groups: list[set[str]] = []
    for name, facts in fx_graph.items():
        if facts["is_real"] and facts["C_permutable"] and not any(name in some for some in groups):
            groups.append(collect_siblings(fx_graph, name, set()))
    return groups


def find_real_siblings(fx_graph: ChannelGraph) -> ChannelGraph:
    """Add ``real_siblings`` to each node: the others of its group, in the network's order."""
    for facts in fx_graph.values():
        facts["real_siblings"] = []
    for group in extract_all_unique_siblings(fx_graph):
        for name in group:
            fx_graph[name]["real_siblings"] = [n for n in fx_graph if n in group and n != name]
    return fx_graph


def fixup_concats(fx_graph: ChannelGraph) -> ChannelGraph:
    """Let ``C_param`` of what reads a concatenation be the gcd of its parts' channels.

    Each part has its own permutation here, where Apex has one for all; so this is for those who
    read the facts.
    """
    for name, facts in fx_graph.items():
        spaces = fx_graph.spaces_read(name)
        if len(spaces) > 1:
            facts["C_param"] = gcd(*(fx_graph.rules.spaces[space].size for space in spaces))
    return fx_graph


def enforce_dimension_agreement(fx_graph: ChannelGraph) -> ChannelGraph:
    """Where a node cannot be permuted in C, forbid K to the nodes whose channels it reads."""
    for facts in fx_graph.values():
        parents = [fx_graph[parent] for parent in facts.get("real_parents", ())]
        if facts["is_real"] and not facts["C_permutable"]:
            for parent in parents:
                parent["K_permutable"] = False
    return fx_graph


def propagate_permutation_flags(fx_graph: ChannelGraph) -> ChannelGraph:
    """Forbid what the rules forbid; ``C_frozen_because`` and ``K_frozen_because`` say why."""
    for name, facts in fx_graph.items():
        for side, spaces in (
            ("C", fx_graph.spaces_read(name)),
            ("K", fx_graph.spaces_made(name)),
        ):
            reason = fx_graph.frozen(spaces)
            facts[f"{side}_frozen_because"] = reason
            if not spaces or reason:
                facts[f"{side}_permutable"] = False
    return fx_graph


def check_graph_for_unpermuted_nodes(fx_graph: ChannelGraph) -> list[str]:
    """Name the dimensions that were not permuted although their channels are to be: ``"a_C"``."""
    missed = []
    for name, facts in fx_graph.items():
        for side, spaces in (
            ("C", fx_graph.spaces_read(name)),
            ("K", fx_graph.spaces_made(name)),
        ):
            should = any(fx_graph.permutations.get(space) is not None for space in spaces)
            if facts["is_real"] and should and not facts[f"{side}_permuted"]:
                missed.append(f"{name}_{side}")
    return missed


def note_permuted(fx_graph: ChannelGraph, permuted: Collection[int]) -> None:
    """Set ``C_permuted`` and ``K_permuted`` of the nodes whose channels were permuted."""
    for name, facts in fx_graph.items():
        facts["C_permuted"] |= any(space in permuted for space in fx_graph.spaces_read(name))
        facts["K_permuted"] |= any(space in permuted for space in fx_graph.spaces_made(name))


def _size(graph: ChannelGraph, spaces: Iterable[int]) -> int:
    return sum(graph.rules.spaces[space].size for space in spaces)


def _say(verbosity: int, text: str) -> None:
    if verbosity > 1:
        print(f"[ASP] {text}")
