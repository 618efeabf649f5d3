"""What of a traced graph is scheduled as one: an operator with a kernel of its own, or what fuses.

The graph is what Inductor compiles: operators of ATen, without mutation except at its end.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

# Rough numbers of data-centre GPUs: they decide which of two paths is longer, and nothing else.
_BYTES_PER_S = 1.5e12
_FLOPS_PER_S = 1e14
_LAUNCH_S = 4e-6
# Operators that talk to other processes or streams, in an order that is not in the graph.
_ORDERED_ELSEWHERE = ("_c10d_functional", "c10d", "_dtensor", "fsdp", "streams", "symm_mem")
_FUSED = ("aten", "prims")
_DEPENDS_ON_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class NotScheduled(Exception):
    """Why a graph stays on one stream."""


@dataclass(frozen=True)
class Group:
    """Nodes that run as one, in the graph's order; their time in s; the groups that they need."""

    nodes: tuple[fx.Node, ...]
    cost_s: float
    needs: tuple[int, ...]


def check(graph: fx.Graph, device_type: str) -> torch.device:
    """The one device of a graph that several streams can run.

    Raises:
        NotScheduled: it has sizes that vary, an operator whose effects or result are not known from
            the graph, or tensors of another kind of device, or of several devices.
    """
    devices = set()
    for node in graph.nodes:
        if node.op == "call_function":
            _check_operator(node)
        for value in _tensors(node.meta.get("val")):
            if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
                raise NotScheduled(f"{node.name} has sizes that vary")
            # The host's scalars are arguments of a launch.
            if node.op != "placeholder" or value.device.type != "cpu" or value.dim():
                devices.add(value.device)
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotScheduled(f"{node.name} is a number that varies")
    if len(devices) != 1 or next(iter(devices)).type != device_type:
        kinds = ", ".join(sorted(map(str, devices))) or "no device"
        raise NotScheduled(f"its tensors are on {kinds}, not on one {device_type} device")
    return devices.pop()


def groups_of(graph: fx.Graph) -> list[Group]:
    """All operators of a graph in groups, each behind the groups that it needs.

    Matrix products, convolutions, attention and custom operators stand alone. What is between them
    (elementwise operators, views, sums) is grouped by connection, as far as no such operator is on
    a way from one to the other; so a group is no obstacle to fusion, and no two groups need each
    other. Operators that draw random numbers keep their order, and all from the first that writes
    to its arguments on are one group, behind everything else.
    """
    nodes, needs = _operators(graph)
    depth: dict[fx.Node, int] = {}  # the largest number of operators of their own on a way here
    for node in nodes:
        depth[node] = max((depth[n] for n in needs[node]), default=0) + _stands_alone(node)
    tail = next((i for i, n in enumerate(nodes) if _writes(n)), len(nodes))
    for node in nodes[tail:]:
        depth[node] = len(nodes)
        needs[node] = nodes[:tail]
    merged = {node: node for node in nodes}

    def root(node: fx.Node) -> fx.Node:
        while merged[node] is not node:
            node = merged[node]
        return node

    for node in nodes[tail:]:
        merged[node] = nodes[tail]
    for node in nodes[:tail]:
        for other in needs[node]:
            alone = _stands_alone(node) or _stands_alone(other)
            if depth[other] == depth[node] and not alone:
                merged[root(node)] = root(other)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(root(node), []).append(node)
    behind = {
        key: {root(n) for node in some for n in needs[node]} - {key}
        for key, some in members.items()
    }
    return _numbered(members, behind)


def _operators(graph: fx.Graph) -> tuple[list[fx.Node], dict[fx.Node, list[fx.Node]]]:
    """Nodes that do something, and which each needs. A part of a result counts as the result."""
    nodes: list[fx.Node] = []
    needs: dict[fx.Node, list[fx.Node]] = {}
    last_random: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        found = {_whole(n): None for n in node.all_input_nodes if n.op == "call_function"}
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            found.update(dict.fromkeys(last_random))
            last_random = [node]
        nodes.append(node)
        needs[node] = list(found)
    return nodes, needs


def _numbered(
    members: dict[fx.Node, list[fx.Node]], behind: dict[fx.Node, set[fx.Node]]
) -> list[Group]:
    """Groups in an order in which each follows those it needs, near the order of the graph."""
    place = {key: i for i, key in enumerate(members)}
    left = {key: len(needed) for key, needed in behind.items()}
    users: dict[fx.Node, list[fx.Node]] = {key: [] for key in members}
    for key, needed in behind.items():
        for other in needed:
            users[other].append(key)
    keys = list(members)
    ready = [place[key] for key in members if not left[key]]
    heapq.heapify(ready)
    number: dict[fx.Node, int] = {}
    result: list[Group] = []
    while ready:
        key = keys[heapq.heappop(ready)]
        number[key] = len(result)
        nodes = tuple(_with_parts(members[key]))
        needed = tuple(sorted(number[other] for other in behind[key]))
        result.append(Group(nodes, _cost_s(nodes), needed))
        for user in users[key]:
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, place[user])
    return result


def _with_parts(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    for node in nodes:
        yield node
        yield from _with_parts(n for n in node.users if n.target is operator.getitem)


def _whole(node: fx.Node) -> fx.Node:
    """The operator of whose result a node is a part."""
    while node.target is operator.getitem:
        node = node.args[0]
    return node


def _stands_alone(node: fx.Node) -> bool:
    """Whether Inductor calls a kernel for it, which fuses with nothing in front of it."""
    return node.target.namespace not in _FUSED or node.target.overloadpacket in flop_registry


def _writes(node: fx.Node) -> bool:
    return node.target._schema.is_mutable


def _check_operator(node: fx.Node) -> None:
    target = node.target
    if target is operator.getitem:
        return
    if not isinstance(target, torch._ops.OpOverload):
        raise NotScheduled(f"{node.name} is no operator, but {target}")
    if target.namespace in _ORDERED_ELSEWHERE:
        raise NotScheduled(f"{node.name} has an order of its own: {target}")
    if any(tag in target.tags for tag in _DEPENDS_ON_DATA):
        raise NotScheduled(f"the result of {node.name} depends on data: {target}")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def _bytes(nodes: Iterable[fx.Node]) -> int:
    return sum(t.numel() * t.element_size() for n in nodes for t in _tensors(n.meta.get("val")))


def _cost_s(nodes: tuple[fx.Node, ...]) -> float:
    """The time of a group by its traffic to memory and its products, whichever is more."""
    own = set(nodes)
    read = {n for node in nodes for n in node.all_input_nodes} - own
    written = [n for n in nodes if any(user not in own for user in n.users)]
    flops = sum(_flops(node) for node in nodes)
    return _LAUNCH_S + max((_bytes(read) + _bytes(written)) / _BYTES_PER_S, flops / _FLOPS_PER_S)


def _flops(node: fx.Node) -> float:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    return float(count(*args, **kwargs, out_val=node.meta["val"]))
