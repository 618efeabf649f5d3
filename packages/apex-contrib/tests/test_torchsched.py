"""The backend torchsched: what torch.compile is, results, gradients of convolutions, settings."""

import functools
import time

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from apex.contrib import torchsched
from apex.contrib.torchsched import backend, config, multi_stream
from apex.contrib.torchsched.config import (
    _get_dump_code,
    _get_num_streams,
    _get_skip_post_grad_graph_ids,
)
from apex.contrib.torchsched.inductor import CUDAStreamPool, get_cuda_stream_pool, get_stream_name
from apex.contrib.torchsched.ops import layer_norm, layer_norm_backward
from apex.contrib.torchsched.passes import pre_grad_passes
from apex_testkit.accuracy import assert_as_accurate_as
from apex_testkit.simulated_streams import SimulatedQueues
from apex_testkit.threads import together

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torchsched.set_default_backend("torch")


def interpreted(gm, example_inputs, **options):
    """In place of ``compile_fx_inner``: runs a graph as it stands."""

    def run(args):
        own = list(args)
        args.clear()
        return gm(*own)

    run._boxed_call = True
    return run


@pytest.fixture
def simulated(monkeypatch):
    """Graphs on the CPU are divided for simulated streams; gives those of each graph."""
    found = []

    def make(device, count):
        found.append(SimulatedQueues()(device, count))
        return found[-1]

    given = functools.partial(
        multi_stream.multi_stream_compile, device_type="cpu", make_queues=make
    )
    monkeypatch.setattr(multi_stream, "multi_stream_compile", given)
    monkeypatch.setattr(multi_stream, "_LEAST_COST_S", 0.0)
    return found


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        return F.relu(self.left(x)) + self.right(x)


def trained(model, x):
    """Output, gradients of the input and of the weights."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    return [y.detach(), x.grad, *grads]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_importing_leaves_torch_compile_as_it_is():
    assert torch.compile is torchsched.__torch_compile__
    assert torch.compile.__module__ == "torch"


def test_the_default_backend_is_chosen_and_put_back(monkeypatch):
    calls = []
    monkeypatch.setattr(
        torchsched, "__torch_compile__", lambda *args, **kwargs: calls.append((args, kwargs))
    )
    monkeypatch.setattr(torch, "compile", torchsched.__torch_compile__)
    plain = torch.compile
    torchsched.set_default_backend("torchsched")
    assert torch.compile is torchsched.torchsched_compile
    torch.compile("model", fullgraph=True)
    torch.compile("model", backend="inductor")
    torch.nn.Linear(1, 1).compile(dynamic=False)
    torchsched.set_default_backend("eager")
    torch.compile("model")
    assert [kwargs.pop("backend") for _, kwargs in calls] == [
        torchsched.torchsched,
        "inductor",
        torchsched.torchsched,
        "eager",
    ]
    assert calls[0] == (("model",), {"fullgraph": True})
    for name in ("torch", "inductor"):
        torchsched.set_default_backend("torchsched")
        torchsched.set_default_backend(name)
        assert torch.compile is plain
    torchsched.torchsched_compile("model")
    assert calls[-1] == (("model",), {"backend": "inductor"})


def test_refuses_another_default(monkeypatch):
    with pytest.raises(ValueError, match=r"backend must be one of torch, torchsched, .*got 'none'"):
        torchsched.set_default_backend("none")
    assert torch.compile is torchsched.__torch_compile__

    def somebody_else(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(torch, "compile", somebody_else)
    with pytest.raises(RuntimeError, match=r"somebody has put there since .* was imported"):
        torchsched.set_default_backend("torchsched")
    torchsched.set_default_backend("torch")
    assert torch.compile is somebody_else


@pytest.mark.every_torch
def test_dynamo_knows_the_name():
    assert "torchsched" in torch.compiler.list_backends()
    assert torch._dynamo.lookup_backend("torchsched") is torchsched.torchsched


def test_on_a_cpu_it_is_inductor(caplog):
    """The whole way, with code that Inductor generates."""
    model, x = Branches(), torch.randn(8, 16)
    with config.patch(debug=True):
        found = trained(torch.compile(model, backend="torchsched", fullgraph=True), x)
    assert_same(found, trained(model, x))
    graphs = [r for r in caplog.records if r.name.startswith("apex.contrib.torchsched")]
    assert len(graphs) == 2  # forward and backward
    assert all("its tensors are on cpu, not on one cuda device" in r.message for r in graphs)


@pytest.mark.every_torch
def test_inductor_compiles_the_parts(simulated):
    """The same, divided: with what the parts tell each other about strides and saved tensors."""
    model, x = Branches(), torch.randn(8, 16)
    compiled, expected = torch.compile(model, backend="torchsched"), trained(model, x)
    for _ in range(2):
        assert_same(trained(compiled, x), expected)
    assert [(q.count > 1, len(q.launches)) for q in simulated] == [(True, 2)] * 2


class Images(torch.nn.Module):
    """Branches of convolutions, of batch norm with running statistics, and of a mean."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.b = torch.nn.Conv2d(3, 8, 1, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.last = torch.nn.Linear(16, 4)

    def forward(self, x):
        y = torch.cat([torch.tanh(self.a(x)), F.relu(self.norm(self.b(x)))], 1)
        return self.last(y.mean((2, 3)))


@pytest.mark.every_torch
@pytest.mark.parametrize("scheme", ["dwb", "wbd"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
def test_training_divided_graphs(simulated, monkeypatch, scheme, channels_last):
    """Gradients, running statistics and strides, with parts that run as they stand."""
    monkeypatch.setattr(
        backend,
        "_convolution_gradients",
        lambda *given: (
            backend.split_convolution_backward(*given) if sum(given[-1]) > 1 else NotImplemented
        ),
    )
    x = torch.randn(2, 3, 6, 6)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    models = Images(), Images()
    chosen = functools.partial(
        torchsched.get_backend("torchsched", scheme), inner_compile=interpreted
    )
    compiled = torch.compile(models[0], backend=chosen)
    for _ in range(2):
        assert_same(trained(compiled, x), trained(models[1], x))
    assert_same(models[0].buffers(), models[1].buffers())
    assert [(q.count > 1, len(q.launches)) for q in simulated] == [(True, 2)] * 2


@pytest.mark.every_torch
def test_options_of_torch_compile(simulated):
    x, model = torch.randn(8, 16), Branches()
    for options in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="torchsched", **options)
        with pytest.raises(Exception, match=r"CUDA graphs .* hold one stream"):
            compiled(x)
    with pytest.raises(Exception, match="Unexpected optimization option none"):
        torch.compile(model, backend="torchsched", options={"none": 1})(x)
    with (
        config.patch(num_streams=0),
        pytest.raises(Exception, match="must be an integer and at least 1, got 0"),
    ):
        torch.compile(model, backend="torchsched")(x)


def test_get_backend():
    with pytest.raises(ValueError, match="backend must be torch or torchsched, got 'eager'"):
        torchsched.get_backend("eager")
    with pytest.raises(ValueError, match="scheme must be dwb or wbd, got 'bwd'"):
        torchsched.get_backend("torchsched", "bwd")
    chosen = torchsched.get_backend("torchsched", "wbd")
    assert chosen == torchsched.get_backend("torchsched", "wbd")
    assert chosen != torchsched.get_backend("torchsched", "dwb")
    own = chosen.decompositions[aten.convolution_backward.default]
    assert own is backend.convolution_backward_decomp_wbd


def test_inductor_s_graphs_are_written_to_files(tmp_path):
    chosen = functools.partial(torchsched.get_backend(), inner_compile=interpreted)
    x = torch.randn(4)
    with config.patch(dump_code_dir=str(tmp_path), dump_code_backends=["torchsched", "inductor"]):
        assert_same([torch.compile(lambda x: x.sin(), backend=chosen)(x)], [x.sin()])
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("inductor_graph_")
    assert "torch.ops.aten.sin" in file.read_text()
    torch._dynamo.reset()
    with config.patch(dump_code_dir=str(tmp_path)):
        torch.compile(lambda x: x.cos(), backend=chosen)(x)
    assert len(list(tmp_path.iterdir())) == 1


# Convolutions: weight, stride, padding, dilation, transposed, output padding, groups.
CONVOLUTIONS = {
    "plain": ([8, 4, 3, 3], [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "strided": ([6, 4, 3, 2], [2, 1], [0, 1], [1, 2], False, [0, 0], 1),
    "grouped": ([8, 2, 3, 3], [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
    "transposed": ([4, 8, 3, 3], [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    "1-D": ([8, 4, 3], [1], [1], [1], False, [0], 1),
}
MASKS = [[True, True, True], [True, False, True], [False, True, True], [True, True, False]]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("scheme", ["dwb", "wbd"])
def test_gradients_of_convolutions(scheme, case, mask):
    shape, *geometry = CONVOLUTIONS[case]
    x, weight = torch.randn(2, 4, *[7] * (len(shape) - 2)), torch.randn(shape)
    channels = shape[1] if geometry[3] else shape[0]
    y = aten.convolution(x, weight, None, *geometry)
    given = torch.randn_like(y), x, weight

    def split(*given):
        return backend.split_convolution_backward(scheme, *given, ([channels], *geometry), mask)

    found = split(*given)
    expected = aten.convolution_backward(*given, [channels], *geometry, mask)
    assert [grad is None for grad in found] == [not wanted for wanted in mask]
    for grad, right in zip(found, expected, strict=True):
        if grad is not None:
            torch.testing.assert_close(grad, right)
    nodes = make_fx(split)(*given).graph.nodes
    calls = [
        "b" if node.target is aten.sum.dim_IntList else "dw"[node.args[-1].index(True)]
        for node in nodes
        if node.target in (aten.sum.dim_IntList, aten.convolution_backward.default)
    ]
    assert calls == [which for which in scheme if mask["dwb".index(which)]]


def test_which_convolutions_are_split():
    shape, *geometry = CONVOLUTIONS["plain"]
    with torch._subclasses.FakeTensorMode():
        for device, mask, is_split in (
            ("cuda:0", [True, True, True], True),
            ("cuda:0", [True, True, False], True),
            ("cuda:0", [False, True, False], False),
            ("cpu", [True, True, True], False),
        ):
            x, weight = torch.empty(2, 4, 7, 7, device=device), torch.empty(shape, device=device)
            dy = torch.empty(2, 8, 7, 7, device=device)
            for split in (
                backend.convolution_backward_decomp_dwb,
                backend.convolution_backward_decomp_wbd,
            ):
                found = split(dy, x, weight, [8], *geometry, mask)
                assert (found is not NotImplemented) == is_split
                if is_split:
                    dx, dw, db = found
                    assert (dx.shape, dw.shape) == (x.shape, weight.shape)
                    assert (db is None) == (not mask[2])


def reference(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 5, 4), (0, 7), (1, 1)], ids=str)
def test_layer_norm(shape, dtype):
    x, dy = (torch.randn(shape, dtype=dtype) for _ in range(2))
    normalized = shape[-2:] if len(shape) == 4 else shape[-1:]
    weight, bias = (torch.randn(normalized, dtype=dtype) for _ in range(2))
    y, mean, invstd = torch.ops.cudnn.layer_norm(x, normalized, weight, bias)
    assert y.is_contiguous()
    assert mean.shape == invstd.shape == (*shape[: -len(normalized)], *[1] * len(normalized))
    if x.numel():
        assert_as_accurate_as(reference, y, x, weight, bias)
    given = [t.clone().requires_grad_() for t in (x, weight, bias)]
    layer_norm(given[0], normalized, *given[1:])[0].backward(dy)
    found = layer_norm_backward(dy, mean, invstd, x, normalized, weight, bias)
    for grad, leaf in zip(found, given, strict=True):
        torch.testing.assert_close(grad, leaf.grad)


def test_layer_norm_is_an_operator():
    x, weight = torch.randn(3, 4).t(), torch.randn(3)
    given = (x, [3], weight, weight)
    torch.library.opcheck(torch.ops.cudnn.layer_norm.default, given)
    y, mean, invstd = layer_norm(*given)
    torch.library.opcheck(
        torch.ops.cudnn.layer_norm_backward.default, (y, mean, invstd, x, [3], weight, weight)
    )


def test_layer_norm_refuses():
    x, w = torch.randn(3, 4), torch.ones(4)
    with pytest.raises(TypeError, match="weight must be a tensor, got NoneType"):
        layer_norm(x, [4], None, w)
    with pytest.raises(ValueError, match=r"last dimensions of x \[3, 4\], got \[3\]"):
        layer_norm(x, [3], w, w)
    with pytest.raises(ValueError, match=r"normalized_shape must be .* got \[\]"):
        layer_norm(x, [], w, w)
    with pytest.raises(ValueError, match=r"bias must have the shape \[4\] .* got \[3\]"):
        layer_norm(x, [4], w, torch.ones(3))
    mean = torch.ones(3, 1)
    with pytest.raises(ValueError, match=r"d_y must have the shape \[3, 4\] of x, got \[4, 3\]"):
        layer_norm_backward(x.t(), mean, mean, x, [4], w, w)


@pytest.mark.parametrize("is_on", [True, False])
def test_layer_norms_are_replaced(monkeypatch, is_on):
    replaced, plain = [], pre_grad_passes.run_pre_grad_pass
    monkeypatch.setattr(
        pre_grad_passes, "run_pre_grad_pass", lambda *given: replaced.append(plain(*given))
    )
    model, x = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)), torch.randn(3, 4)
    chosen = functools.partial(torchsched.torchsched, inner_compile=interpreted)
    with config.patch(enable_pre_grad_pass=is_on):
        assert_same(trained(torch.compile(model, backend=chosen), x), trained(model, x))
    assert replaced == [1] * is_on


def graph_of(function, *names):
    graph = torch.fx.Graph()
    graph.output(function(graph, *(graph.placeholder(name) for name in names)))
    return graph


def test_pre_grad_pass():
    def norms(graph, x, w, b):
        y = graph.call_function(F.layer_norm, (x, (4,), w, b, 1e-3))
        z = graph.call_function(F.layer_norm, (y, (4,)), {"bias": b, "weight": w})
        return graph.call_function(F.layer_norm, (z, (4,), w))  # has no bias

    graph = graph_of(norms, "x", "w", "b")
    given = torch.randn(3, 4), torch.randn(4), torch.randn(4)
    expected = torch.fx.GraphModule({}, graph)(*given)
    pre_grad_passes.pre_grad_custom_pass(graph)
    targets = [node.target for node in graph.find_nodes(op="call_function", target=F.layer_norm)]
    assert len(targets) == 1
    assert len(graph.find_nodes(op="call_function", target=torch.ops.cudnn.layer_norm)) == 2
    torch.testing.assert_close(torch.fx.GraphModule({}, graph)(*given), expected)


def test_patterns(monkeypatch):
    monkeypatch.setattr(pre_grad_passes, "_PATTERNS", dict(pre_grad_passes._PATTERNS))
    pre_grad_passes.register_pattern("double", torch.relu, lambda x: x + x)
    with pytest.raises(ValueError, match="'double' is registered already"):
        pre_grad_passes.register_pattern("double", torch.relu, torch.tanh)
    graph = graph_of(lambda graph, x: graph.call_function(torch.relu, (x,)), "x")
    pre_grad_passes.pre_grad_custom_pass(graph)
    assert graph.find_nodes(op="call_function", target=torch.relu), "is not named in the options"
    with config.patch(pre_grad_pass_options=["double"]):
        pre_grad_passes.pre_grad_custom_pass(graph)
    assert torch.fx.GraphModule({}, graph)(torch.tensor(-3.0)) == -6
    with config.patch(pre_grad_pass_options=["none"]), pytest.raises(ValueError, match="'none'"):
        pre_grad_passes.pre_grad_custom_pass(graph)
    graph = graph_of(lambda graph, x: graph.call_function(torch.tanh, (x,)), "x")
    with pytest.raises(RuntimeError, match=r"replacement 'wrong' of .*tanh.* failed"):
        pre_grad_passes.run_pre_grad_pass("wrong", graph, torch.tanh, lambda: 0)


def test_settings_of_the_environment(monkeypatch):
    assert _get_num_streams() == 8
    assert _get_skip_post_grad_graph_ids() == set()
    assert _get_dump_code() == (["torchsched"], None)
    monkeypatch.setenv("TORCH_SCHED_NUM_STREAMS", "3")
    monkeypatch.setenv("TORCH_SCHED_SKIP_GRAPH_IDS", "1, 3-5")
    monkeypatch.setenv("TORCH_SCHED_DUMP_CODE", "+inductor,folder")
    assert _get_num_streams() == 3
    assert _get_skip_post_grad_graph_ids() == {1, 3, 4, 5}
    assert _get_dump_code() == (["torchsched", "inductor"], "folder")
    for name, text, read in (
        ("TORCH_SCHED_NUM_STREAMS", "0", _get_num_streams),
        ("TORCH_SCHED_NUM_STREAMS", "many", _get_num_streams),
        ("TORCH_SCHED_SKIP_GRAPH_IDS", "1-x", _get_skip_post_grad_graph_ids),
        ("TORCH_SCHED_DUMP_CODE", "eager,folder", _get_dump_code),
    ):
        monkeypatch.setenv(name, text)
        with pytest.raises(ValueError, match=f"{name} must be"):
            read()


def test_settings():
    assert config.pre_grad_pass_options == ["cudnn_layer_norm"]
    assert not config.enable_pre_grad_pass
    with config.patch(num_streams=2):
        assert config.num_streams == 2
    assert config.num_streams == 8
    with pytest.raises(AttributeError):
        config.no_such_setting = 1


def test_names_of_streams():
    assert [get_stream_name(i) for i in range(3)] == ["default_stream", "stream1", "stream2"]
    with pytest.raises(ValueError, match="stream_idx must be at least 0, got -1"):
        get_stream_name(-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are streams")
def test_pools_need_a_device():
    for make in (CUDAStreamPool, get_cuda_stream_pool):
        with pytest.raises(RuntimeError, match="torch sees no CUDA device"):
            make()
        with pytest.raises(ValueError, match="pool_size must be at least 1, got 0"):
            make(pool_size=0)


@pytest.fixture
def streams(monkeypatch):
    """Objects for streams, of a device that is not there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda._utils, "_get_device_index", lambda device, optional: 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())


def test_threads_share_a_pool_and_not_what_they_entered(streams, monkeypatch):
    made = CUDAStreamPool.__init__

    def slowly(self, *args):
        time.sleep(0.05)
        made(self, *args)

    monkeypatch.setattr(CUDAStreamPool, "__init__", slowly)
    pool, *others = together(*[lambda: get_cuda_stream_pool(pool_size=4)] * 4)
    assert all(other is pool for other in others)
    with pool as stream:
        (other,) = together(pool.__enter__)
    assert other is not stream
    assert pool.acquire() is stream  # what this thread gave back
    together(lambda: pool.__exit__(None, None, None))  # in another thread than it was entered in
    assert pool.acquire() is other


def test_pools(streams):
    pool = get_cuda_stream_pool(pool_size=3)
    assert pool is get_cuda_stream_pool(pool_size=3)
    assert pool.device == torch.device("cuda", 1)
    first = [pool.acquire() for _ in range(4)]
    assert len(set(first)) == 3
    assert first[3] is first[0]
    pool.release(first[1])
    with pool as stream, pool as other:
        assert stream is first[1]
        assert other is not stream
    with pytest.raises(ValueError, match="is not of this pool"):
        pool.release(object())
