"""A graph compiled in parts, which run on the streams that the schedule says.

Inductor compiles each part as a graph of its own. So nothing of Inductor is replaced, and this
works where ``compile_fx_inner`` does. Operators of different parts are not fused.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from . import config
from .groups import Group, NotScheduled, check, groups_of
from .queues import CudaQueues, Part
from .schedule import ENTRANCE, Schedule, runs, schedule

log = logging.getLogger(__name__)

# Two events and a call of another compiled function, on the host: less is not worth a stream.
_LEAST_COST_S = 10e-6
_graph_ids = itertools.count()


class StreamedGraph:
    """What runs the parts of a graph: a boxed function, as Inductor's are.

    Args:
        parts: in the order of launches.
        found: their schedule.
        inputs, outputs: names, in order; an output may be a constant instead.
        streamed: outputs that another stream than the caller's made.
        queues: how parts are launched on streams.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        found: Schedule,
        inputs: Sequence[str],
        outputs: Sequence[Any],
        streamed: Sequence[str],
        queues: Any,
    ) -> None:
        # Takes one list, and empties it. Of the object, because wrappers copy what is in that.
        self._boxed_call = True
        self.parts, self.schedule = tuple(parts), found
        self._inputs, self._outputs, self._streamed = inputs, outputs, streamed
        self._queues = queues

    def __call__(self, args: list[Any]) -> list[Any]:
        values = dict(zip(self._inputs, args, strict=True))
        args.clear()
        recorded = self.schedule.recorded
        with self._queues.begin(values) as launch:
            if ENTRANCE in recorded:
                launch.record(ENTRANCE, 0)
            for part in self.parts:
                launch.part(part, is_recorded=part.number in recorded)
            launch.wait(0, self.schedule.final_waits)
            launch.keep(self._streamed, 0)
        return [values[o.name] if isinstance(o, fx.Node) else o for o in self._outputs]


def multi_stream_compile(
    inner_compile: Callable[..., Any],
    num_streams: int | None = None,
    device_type: str = "cuda",
    make_queues: Callable[[torch.device, int], Any] = CudaQueues,
) -> Callable[..., Any]:
    """A function like ``compile_fx_inner`` whose result runs on several streams where it can.

    Args:
        inner_compile: what compiles each part, and whole graphs that stay on one stream.
        num_streams: as ``config.num_streams``, which is the default, at each call.
        device_type, make_queues: graphs of which device are taken, and what launches their parts.
    """

    def compiled(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        graph_id = next(_graph_ids)
        # The graph is decomposed by now, and torch 2.12 cannot pickle this for its cache.
        options.pop("get_decomp_fn", None)
        streams = config.num_streams if num_streams is None else num_streams
        try:
            if graph_id in config.skip_post_grad_graph_ids:
                raise NotScheduled("config.skip_post_grad_graph_ids has it")
            groups, found, device = _planned(gm, example_inputs, streams, device_type)
        except NotScheduled as reason:
            _report(graph_id, gm, f"graph {graph_id} stays on one stream: {reason}")
            return inner_compile(gm, example_inputs, **options)
        _refuse_options(options)
        text = "\n".join(_described(groups, found))
        _report(graph_id, gm, f"graph {graph_id} on {1 + max(found.streams)} streams:\n{text}")
        queues = make_queues(device, 1 + max(found.streams))
        with _parts_alone():
            return _in_parts(gm, groups, found, inner_compile, options, queues)

    return compiled


def _planned(
    gm: fx.GraphModule, example_inputs: Sequence[Any], streams: int, device_type: str
) -> tuple[list[Group], Schedule, torch.device]:
    if not isinstance(streams, int) or streams < 1:
        raise ValueError(
            f"torchsched: config.num_streams must be an integer and at least 1, got {streams!r}."
        )
    if streams == 1:
        raise NotScheduled("config.num_streams is 1")
    device = check(gm.graph, device_type)
    groups = groups_of(gm.graph)
    needs = [group.needs for group in groups]
    found = schedule([group.cost_s for group in groups], needs, streams, _LEAST_COST_S)
    if not any(found.streams):
        raise NotScheduled("no operators off its longest path are worth a stream")
    _update_strides(gm, example_inputs)
    return groups, found, device


def _refuse_options(options: dict[str, Any]) -> None:
    """Options of Inductor under which a graph cannot be run in parts."""
    from torch._inductor import config as inductor_config

    cudagraphs = options.get("cudagraphs")
    if inductor_config.triton.cudagraphs or (cudagraphs is not None and bool(cudagraphs)):
        raise ValueError(
            "torchsched: Inductor's CUDA graphs (mode='reduce-overhead', triton.cudagraphs) hold "
            "one stream. Set apex.contrib.torchsched.config.num_streams to 1; or turn them off, "
            "and capture the compiled function with torch.cuda.graph."
        )
    if inductor_config.cpp_wrapper or options.get("cpp_wrapper"):
        raise ValueError(
            "torchsched: cpp_wrapper makes one C++ function of a whole graph. Turn it off, or set "
            "apex.contrib.torchsched.config.num_streams to 1."
        )


def _update_strides(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Compute again what each node gives: saved tensors may have other strides than were traced.

    Raises:
        NotScheduled: an output has strides that Inductor was told to change.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # other strides may not allow a view
    mode = torch._guards.detect_fake_mode(example_inputs)
    FakeTensorProp(gm, mode=mode).propagate_dont_convert_inputs(*example_inputs)
    (output,) = gm.graph.find_nodes(op="output")
    wanted = output.meta.get("original_output_strides")
    for value, strides in zip(output.args[0], wanted or (), strict=False):
        if isinstance(value, fx.Node) and strides is not None:
            own = value.meta["val"].stride()
            if tuple(strides) != own:
                raise NotScheduled(f"{value.name} has strides {own}, but {strides} are expected")


@contextlib.contextmanager
def _parts_alone() -> Iterator[None]:
    """Hide from Inductor what it would take for the inputs and outputs of a part."""
    context = torch._guards.TracingContext.try_get()
    with contextlib.ExitStack() as stack:
        # All parts keep the strides that were traced, so there is none to report. Inductor's cache
        # does not tell such a graph from one whose strides are free.
        tag = torch.compiler.config.cache_key_tag
        stack.enter_context(torch.compiler.config.patch(cache_key_tag=f"{tag}torchsched"))
        if context is not None:
            stack.enter_context(_set_for_now(context, "output_strides", None))
        if context is not None and context.fw_metadata is not None:
            stack.enter_context(_set_for_now(context.fw_metadata, "bw_donated_idxs", None))
        yield


@contextlib.contextmanager
def _set_for_now(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _in_parts(
    gm: fx.GraphModule,
    groups: list[Group],
    found: Schedule,
    inner_compile: Callable[..., Any],
    options: dict[str, Any],
    queues: Any,
) -> StreamedGraph:
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    placeholders = gm.graph.find_nodes(op="placeholder")
    (output,) = gm.graph.find_nodes(op="output")
    outputs = list(output.args[0])
    every_run = runs(found)
    own_nodes = [
        sorted((n for number in run.nodes for n in groups[number].nodes), key=order.__getitem__)
        for run in every_run
    ]
    made_by = {
        node: run.stream for run, nodes in zip(every_run, own_nodes, strict=True) for node in nodes
    }
    inputs = [_inputs_of(nodes) for nodes in own_nodes]
    last_use = {node: place for place, needed in enumerate(inputs) for node in needed}
    kept = {node for node in outputs if isinstance(node, fx.Node)}
    read = kept.union(*inputs)
    static = {placeholders[i] for i in options.get("static_input_idxs", ())}
    parts = []
    for place, (run, nodes) in enumerate(zip(every_run, own_nodes, strict=True)):
        given = [node for node in nodes if node in read and _is_tensor(node)]
        module = _extracted(gm, nodes, inputs[place], given)
        own_options = dict(options)
        own_options["static_input_idxs"] = [i for i, n in enumerate(inputs[place]) if n in static]
        examples = [node.meta["val"] for node in inputs[place]]
        released = [n for n in inputs[place] if last_use[n] == place and n not in kept]
        foreign = [n for n in inputs[place] if made_by.get(n, 0) != run.stream]
        parts.append(
            Part(
                run.stream,
                run.nodes[-1],
                run.waits,
                _names(inputs[place]),
                _names(given),
                _names(foreign),
                _names(released),
                inner_compile(module, examples, **own_options),
            )
        )
    streamed = [node for node in kept if made_by.get(node, 0)]
    return StreamedGraph(parts, found, _names(placeholders), outputs, _names(streamed), queues)


def _names(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What nodes read that others make; constants are part of each graph."""
    own = set(nodes)
    found = {n: None for node in nodes for n in node.all_input_nodes if n.op != "get_attr"}
    return [node for node in found if node not in own]


def _extracted(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> fx.GraphModule:
    """A graph of some nodes, whose outputs keep the strides that were traced."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta.copy()

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # a constant
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copied)
    output = graph.output([copies[node] for node in outputs])
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    return fx.GraphModule(gm, graph)


def _described(groups: list[Group], found: Schedule) -> Iterator[str]:
    for number, (group, stream) in enumerate(zip(groups, found.streams, strict=True)):
        waits = ", ".join("the entrance" if n == ENTRANCE else str(n) for n in found.waits[number])
        names = ", ".join(node.name for node in group.nodes)
        behind = f", after {waits}" if waits else ""
        yield f"# {number}: stream {stream}{behind}, {group.cost_s * 1e6:.1f} us: {names}"


def _report(graph_id: int, gm: fx.GraphModule, text: str) -> None:
    """Log what was decided; also on the log's last resort with ``config.debug``, or to a file."""
    log.log(logging.WARNING if config.debug else logging.DEBUG, "torchsched: %s", text)
    dump("torchsched", graph_id, gm, text)


def dump(backend: str, graph_id: int, gm: fx.GraphModule, text: str = "") -> None:
    """Write a graph as Python to ``config.dump_code_dir``, where that is asked for."""
    if config.dump_code_dir is None or backend not in config.dump_code_backends:
        return
    folder = Path(config.dump_code_dir)
    folder.mkdir(parents=True, exist_ok=True)
    comment = "".join(f"# {line.removeprefix('# ')}\n" for line in text.splitlines())
    readable = gm.print_readable(print_output=False, include_stride=True, include_device=True)
    (folder / f"{backend}_graph_{graph_id}.py").write_text(comment + readable)
