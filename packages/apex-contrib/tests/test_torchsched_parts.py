"""Graphs in parts on simulated streams: any order that streams and events allow is right."""

import contextlib

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apex.contrib.torchsched import config, multi_stream, queues
from apex.contrib.torchsched.groups import NotScheduled, check, groups_of
from apex.contrib.torchsched.multi_stream import multi_stream_compile
from apex.contrib.torchsched.schedule import ENTRANCE
from apex_testkit.simulated_streams import SimulatedQueues

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def no_least_cost(monkeypatch):
    monkeypatch.setattr(multi_stream, "_LEAST_COST_S", 0.0)


def interpreted(gm, example_inputs, **options):
    """In place of Inductor: runs a part as it stands, and holds it to what it was compiled for."""
    expected = [(t.shape, t.stride(), t.dtype) for t in example_inputs]

    def run(args):
        assert [(t.shape, t.stride(), t.dtype) for t in args] == expected
        return gm(*args)

    return run


def traced(function, *args):
    gm = make_fx(function, tracing_mode="fake")(*args)
    (output,) = gm.graph.find_nodes(op="output")
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
    gm.recompile()
    return gm


def streamed(function, *args, streams=4, seed=0, compile_part=interpreted, **options):
    gm = traced(function, *args)
    made = SimulatedQueues(seed)
    compiled = multi_stream_compile(compile_part, streams, "cpu", made)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        examples = [mode.from_tensor(t) for t in args]
    return compiled(gm, examples, **options), made


def matrices(count, n=16):
    torch.manual_seed(0)
    return [torch.randn(n, n, dtype=torch.float64) for _ in range(count)]


def branches(x, a, b, c, d):
    left = torch.relu(x @ a) @ b
    right = (x.t() @ c).sin()
    return (left + right) @ d, right.t(), x


def inception(x, *weights):
    parts = [torch.tanh(x @ w) @ w.t() for w in weights]
    return torch.cat(parts, 1), sum(parts)


def parts_of_results(x, a):
    values, places = (x @ a).max(1)
    y, mean, rstd = aten.native_layer_norm(x @ a.t(), [x.shape[1]], a[0], a[1], 1e-5)
    return values[:, None] * y, places, mean @ a[:1], rstd


def constant(x, a):
    both = torch.tensor([2.0, 3.0], dtype=torch.float64)  # a tensor that the graph holds
    return x @ a + both[0], (x @ a.t() * both[1]).cos()


FUNCTIONS = {
    "branches": (branches, 5, 2),
    "inception": (inception, 5, 4),
    "parts of results": (parts_of_results, 2, 4),
    "constant": (constant, 2, 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_same_results(name, seed):
    function, count, streams = FUNCTIONS[name]
    args = matrices(count)
    compiled, made = streamed(function, *args, seed=seed)
    assert made.count == streams
    for _ in range(2):  # a compiled graph is called again
        given = list(args)
        results = compiled(given)
        assert given == []
        for result, expected in zip(results, function(*args), strict=True):
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
            assert result.stride() == expected.stride()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_memory_of_other_streams_is_kept(name):
    """What a stream reads of others, and what side streams give to the caller."""
    function, count, _ = FUNCTIONS[name]
    args = matrices(count)
    compiled, made = streamed(function, *args)
    results = compiled(list(args))
    (launches,) = made.launches
    given = {
        n
        for n, s in launches.made_by.items()
        if s and any(launches.values[n] is r for r in results)
    }
    assert launches.kept == {(name, 0) for name in given}
    released = [name for part in compiled.parts for name in part.released]
    assert len(released) == len(set(released))
    for place, part in enumerate(compiled.parts):
        for later in compiled.parts[place + 1 :]:
            assert set(part.released).isdisjoint(later.inputs)


def test_longest_path_is_on_the_caller_s_stream():
    def function(x, a, b):
        y = x @ a @ a @ a
        return y, x @ b

    compiled, _ = streamed(function, *matrices(3))
    assert [(part.stream, part.waits) for part in compiled.parts] == [(0, ()), (1, (ENTRANCE,))]
    assert compiled.parts[1].foreign == ("x_1", "b_1")
    assert compiled.schedule.final_waits == (compiled.parts[1].number,)


def test_writes_come_last():
    def function(x, a, b):
        y, z = x @ a, x @ b
        x.copy_(y + z)
        return z + 1

    args = matrices(3)
    own = [t.clone() for t in args]
    compiled, made = streamed(function, *args, seed=3)
    (result,) = compiled(list(args))
    (expected,) = (function(*own),)
    assert torch.equal(result, expected)
    assert torch.equal(args[0], own[0])
    assert made.count == 2


def test_random_numbers_keep_their_order():
    def function(x, a, b):
        left, _ = aten.native_dropout(x @ a, 0.5, True)
        right, mask = aten.native_dropout(x @ b, 0.5, True)
        return left @ a, right @ b, mask, aten.native_dropout(x, 0.5, True)[0]

    args = matrices(3)
    for seed in range(5):
        compiled, made = streamed(function, *args, seed=seed)
        assert made.count > 1
        torch.manual_seed(1)
        results = compiled(list(args))
        torch.manual_seed(1)
        for result, expected in zip(results, function(*args), strict=True):
            assert torch.equal(result, expected)


def test_options_of_inductor_reach_the_parts():
    seen = []

    def compile_part(gm, example_inputs, **options):
        names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
        seen.append(({names[i] for i in options["static_input_idxs"]}, options["is_backward"]))
        (output,) = gm.graph.find_nodes(op="output")
        assert output.meta["user_visible_output_idxs"] == list(range(len(output.args[0])))
        return interpreted(gm, example_inputs)

    streamed(
        lambda x, a, b: (x @ a @ a, x @ b),
        *matrices(3),
        compile_part=compile_part,
        static_input_idxs=[1, 2],
        is_backward=True,
    )
    assert seen == [({"a_1"}, True), ({"b_1"}, True)]


def test_strides_are_those_of_the_inputs():
    """Saved tensors come with other strides than were traced; a view of them may need a copy."""

    def function(x, a):
        return (x.view(-1) @ a.view(-1)).exp(), x @ a.t(), x + 1

    x, a = matrices(2)
    gm = traced(function, x, a)
    other = x.t().contiguous().t()
    with torch._subclasses.FakeTensorMode() as mode:
        examples = [mode.from_tensor(t) for t in (other, a)]
    compiled = multi_stream_compile(interpreted, 3, "cpu", SimulatedQueues())(gm, examples)
    results = compiled([other, a])
    for result, expected in zip(
        results, (x.reshape(-1) @ a.view(-1), x @ a.t(), x + 1), strict=True
    ):
        torch.testing.assert_close(result, expected.exp() if expected.dim() == 0 else expected)


def why(gm, device_type="cpu"):
    with pytest.raises(NotScheduled) as caught:
        check(gm.graph, device_type)
    return str(caught.value)


def test_graphs_that_stay_on_one_stream():
    x, a = matrices(2)
    assert (
        why(traced(branches, *matrices(5)), "cuda")
        == "its tensors are on cpu, not on one cuda device"
    )
    assert "depends on data" in why(traced(lambda x: (x.nonzero(),), x))
    varying = make_fx(lambda x, a: (x @ a,), tracing_mode="symbolic")(x, a)
    assert "varies" in why(varying) or "sizes that vary" in why(varying)

    def both(x, a):
        return x @ a, torch.empty(3, device="meta")

    assert why(traced(both, x, a)) == "its tensors are on cpu, meta, not on one cpu device"
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.ops.streams.record_event.default, (0, 0)),))
    assert "has an order of its own: streams.record_event" in why(torch.fx.GraphModule({}, graph))
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.cond, ()),))
    assert "is no operator" in why(torch.fx.GraphModule({}, graph))


@pytest.mark.parametrize(
    ("function", "settings", "text"),
    [
        (lambda x, a: (x @ a @ a,), {}, "no operators off its longest path are worth a stream"),
        (lambda x, a: (x @ a, x @ a.t()), {"num_streams": 1}, "config.num_streams is 1"),
        (lambda x, a: (x @ a, x @ a.t()), {"skip": True}, "config.skip_post_grad_graph_ids has it"),
    ],
)
def test_what_is_not_divided_is_compiled_whole(function, settings, text, caplog):
    gm, seen = traced(function, *matrices(2)), []

    def compile_whole(gm, example_inputs, **options):
        seen.append((gm, options))
        return "compiled"

    skipped = set(range(10**4)) if settings.pop("skip", False) else set()
    with config.patch(debug=True, skip_post_grad_graph_ids=skipped, **settings):
        compiled = multi_stream_compile(
            compile_whole, device_type="cpu", make_queues=SimulatedQueues()
        )
        assert compiled(gm, matrices(2), is_backward=True) == "compiled"
    assert seen == [(gm, {"is_backward": True})]
    assert "stays on one stream: " + text in caplog.text


def test_refuses_what_holds_one_stream():
    class Boxed:
        def __bool__(self):
            return True

    with pytest.raises(ValueError, match=r"CUDA graphs .* hold one stream. Set apex"):
        streamed(branches, *matrices(5), cudagraphs=Boxed())
    with pytest.raises(ValueError, match=r"cpp_wrapper makes one C\+\+ function"):
        streamed(branches, *matrices(5), cpp_wrapper=True)
    for streams in (0, 1.5, "4"):
        with pytest.raises(ValueError, match=f"an integer and at least 1, got {streams!r}"):
            streamed(branches, *matrices(5), streams=streams)


def test_graphs_and_schedules_are_written_to_files(tmp_path, caplog):
    with config.patch(dump_code_dir=str(tmp_path / "new"), debug=True):
        streamed(branches, *matrices(5))
    (file,) = (tmp_path / "new").iterdir()
    text = file.read_text()
    assert file.name.startswith("torchsched_graph_")
    assert "on 2 streams:\n# 0: stream" in text
    assert "stream 1, after the entrance" in text
    assert "def forward(self" in text
    assert "on 2 streams" in caplog.text


def test_groups_leave_inductor_what_fuses():
    """Between two products everything elementwise is one group; products stand alone."""
    gm = traced(lambda x, a: (torch.relu(x @ a + 1).sin() @ a, (x + 1).sum()), *matrices(2))
    groups = groups_of(gm.graph)
    names = [[node.target.overloadpacket for node in group.nodes] for group in groups]
    assert [aten.mm] in names
    assert [aten.add, aten.relu, aten.sin] in names
    assert [aten.add, aten.sum] in names
    assert all(group.needs == tuple(sorted(set(group.needs))) for group in groups)
    product = next(g for g in groups if g.nodes[0].target is aten.mm.default)
    assert product.cost_s == pytest.approx(4e-6 + 3 * 16 * 16 * 8 / 1.5e12)


def test_large_products_are_bound_by_arithmetic():
    with torch.device("meta"):
        x = torch.empty(4096, 4096, dtype=torch.bfloat16)
    (group,) = groups_of(traced(lambda x: (x @ x,), x).graph)
    assert group.cost_s == pytest.approx(4e-6 + 2 * 4096**3 / 1e14)


class Stream:
    """A stand-in for torch.cuda.Stream that notes what it is asked."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_event(self, event):
        self.log.append(("wait", self.name, event.number))


class Event:
    made = 0

    def __init__(self):
        Event.made += 1
        self.number = None

    def record(self, stream):
        stream.log.append(("record", stream.name))
        self.number = stream.name


class Value:
    is_cuda = True

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_stream(self, stream):
        self.log.append(("keep", self.name, stream.name))


@pytest.fixture
def cuda_log(monkeypatch):
    """Stand-ins for torch.cuda, and the log of what they are asked; no card has run these tests."""
    log = []

    class Pool:
        def acquire(self):
            return Stream("side", log)

    @contextlib.contextmanager
    def entered(what):
        log.append(("enter", getattr(what, "name", what)))
        yield
        log.append(("exit", getattr(what, "name", what)))

    monkeypatch.setattr(queues, "get_cuda_stream_pool", lambda device: Pool())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("caller", log))
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    Event.made = 0
    return log


EXPECTED = [
    ("enter", torch.device("cuda", 0)),
    ("record", "caller"),
    ("wait", "side", "caller"),
    ("keep", "x", "side"),
    ("enter", "side"),
    ("run", ["x", "w"]),
    ("exit", "side"),
    ("record", "side"),
    ("wait", "caller", "side"),
    ("keep", "y", "caller"),
    ("exit", torch.device("cuda", 0)),
]


@pytest.mark.parametrize("reuse", [True, False])
def test_launches_on_cuda(cuda_log, reuse):
    def run(args):
        cuda_log.append(("run", [a.name for a in args]))
        return [Value("y", cuda_log)]

    part = queues.Part(1, 3, (ENTRANCE,), ("x", "w"), ("y",), ("x",), ("x",), run)
    found = queues.CudaQueues(torch.device("cuda", 0), 2)
    with config.patch(reuse_cuda_event=reuse):
        for _ in range(2):
            values = {name: Value(name, cuda_log) for name in ("x", "w")}
            cuda_log.clear()
            with found.begin(values) as launches:
                launches.record(ENTRANCE, 0)
                launches.part(part, is_recorded=True)
                launches.wait(0, [3])
                launches.keep(["y"], 0)
            assert set(values) == {"w", "y"}
            assert cuda_log == EXPECTED
    assert Event.made == (2 if reuse else 4)
