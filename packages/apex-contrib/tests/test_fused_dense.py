"""apex.fused_dense against dense layers of PyTorch in float64."""

import copy
import inspect
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import apex.fused_dense.fused_dense as module
from apex.contrib._shared.native import half_matmul
from apex.contrib.dense_epilogue import dense_activation_backward, dense_gelu
from apex.fused_dense import (
    DenseNoBiasFunc,
    FusedDense,
    FusedDenseFunc,
    FusedDenseGeluDense,
    FusedDenseGeluDenseFunc,
    decompositions,
    dense_no_bias_function,
    fused_dense_function,
    fused_dense_gelu_dense_function,
)
from apex_testkit import FLOATS, assert_as_accurate_as, assert_compiles
from apex_testkit.formulas import CHECKS, Case

HALVES = torch.float16, torch.bfloat16


def gelu_dense(x, weight1, bias1, weight2, bias2):
    hidden = F.gelu(F.linear(x, weight1, bias1), approximate="tanh")
    return F.linear(hidden, weight2, bias2)


def matrix(rows, columns, dtype, device):
    """As of a trained layer: its products are not larger than its input."""
    return (torch.randn(rows, columns, device=device) / max(columns, 1) ** 0.5).to(dtype)


def operands(name, rows, dtype, device, sizes=(7, 33, 12)):
    first, hidden, last = sizes
    x, b1, b2 = (
        torch.randn(*shape, device=device).to(dtype)
        for shape in ((*rows, first), (hidden,), (last,))
    )
    w1, w2 = matrix(hidden, first, dtype, device), matrix(last, hidden, dtype, device)
    return {
        "dense": [x, w1, b1],
        "no bias": [x, w1],
        "gelu": [x, w1, b1, w2, b2],
        "gelu without biases": [x, w1, w2],
    }[name]


# name: ours, and plain PyTorch
FUNCTIONS = {
    "dense": (fused_dense_function, F.linear),
    "no bias": (dense_no_bias_function, F.linear),
    "gelu": (fused_dense_gelu_dense_function, gelu_dense),
    "gelu without biases": (
        lambda x, w1, w2: fused_dense_gelu_dense_function(x, w1, None, w2, None),
        lambda x, w1, w2: gelu_dense(x, w1, None, w2, None),
    ),
}


def with_gradients(function, dy, given):
    given = [t.detach().requires_grad_() for t in given]
    y = function(*given)
    return y.detach(), *torch.autograd.grad(y, given, dy)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("rows", [(5,), (0,), (1,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, rows, name, device):
    function, plain = FUNCTIONS[name]
    given = operands(name, rows, dtype, device)
    with torch.no_grad():
        alone = function(*given)
    dy = torch.randn_like(alone)
    actual = with_gradients(function, dy, given)
    reference = lambda dy, *given: with_gradients(plain, dy, given)
    # Every product is rounded in each direction, to an ulp of the largest element; GELU once more.
    assert_as_accurate_as(reference, actual, dy, *given, ulps=4)
    assert torch.equal(alone, actual[0])
    assert [g.dtype for g in actual[1:]] == [t.dtype for t in given]


@pytest.mark.parametrize("name", ["dense", "gelu"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_layout(dtype, name, device):
    function, _ = FUNCTIONS[name]
    given = operands(name, (2, 5), dtype, device)
    dy = torch.randn_like(function(*given))
    expected = with_gradients(function, dy, given)
    strided = [torch.stack([t, t], -1)[..., 0] for t in given]
    transposed = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in given]
    for laid_out in (strided, transposed):
        given_dy = dy.transpose(0, 1).contiguous().transpose(0, 1)
        actual = with_gradients(function, given_dy, laid_out)
        unit = 4 * torch.finfo(dtype).eps
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=unit, atol=4 * unit * e.abs().max().item())


def case(name, operators):
    function, plain = FUNCTIONS[name]
    return Case(
        function,
        lambda dtype, device: tuple(operands(name, (4,), dtype, device, (6, 5, 3))),
        plain,
        grads=tuple(range(len(operands(name, (1,), torch.float32, "cpu")))),
        rows=(0,),
        operators=operators,
        decompositions=decompositions,
        ulps=8,  # truth rounds as often: sums of products, and GELU
        without={"batch invariance": "torch's matrix products choose by size"},
    )


OPERATORS = dense_gelu, dense_activation_backward
ATEN = torch.ops.aten.addmm.default, torch.ops.aten.mm.default
CASES = {"dense": case("dense", ATEN), "gelu": case("gelu", OPERATORS)}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_composed(case, check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    if case is CASES["dense"]:
        if check is CHECKS["decompositions"]:
            return  # of our operators, of which it has none
        if check is CHECKS["export"]:
            case = replace(case, operators=(torch.ops.aten.linear.default, None))
    check(case, device)


def on_ranks(rank, world_size):
    """DTensors whose rows are shared out stay so."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    for name, (function, plain) in FUNCTIONS.items():
        given = operands(name, (4,), torch.float32, "cpu")
        dy = torch.randn_like(plain(*given))
        expected = with_gradients(plain, dy, given)
        placed = [
            distribute_tensor(t, mesh, [Replicate() if i else Shard(0)]).requires_grad_()
            for i, t in enumerate(given)
        ]
        y = function(*placed)
        assert isinstance(y, DTensor)
        torch.testing.assert_close(y.full_tensor(), expected[0])
        y.backward(distribute_tensor(dy, mesh, y.placements))
        for tensor, gradient in zip(placed, expected[1:], strict=True):
            torch.testing.assert_close(tensor.grad.full_tensor(), gradient)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_only_what_is_needed(name, device):
    function, _ = FUNCTIONS[name]
    values = operands(name, (5,), torch.float32, device)
    dy = torch.randn_like(function(*values))
    expected = with_gradients(function, dy, values)[1:]
    for wanted in range(len(values)):
        given = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(values)]
        function(*given).backward(dy)
        assert [i for i, t in enumerate(given) if t.grad is not None] == [wanted]
        torch.testing.assert_close(given[wanted].grad, expected[wanted])


@pytest.mark.parametrize("name", ["dense", "gelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_first_and_stays_outside(dtype, name, device):
    function, _ = FUNCTIONS[name]
    given = operands(name, (64,), torch.float32, device)
    dy = torch.randn_like(function(*given)).to(dtype)
    expected = with_gradients(function, dy, [t.to(dtype) for t in given])
    leaves = [t.detach().requires_grad_() for t in given]
    with torch.autocast(device.type, dtype):
        y = function(*leaves)
        gradients = torch.autograd.grad(y, leaves, dy)
        with torch.no_grad():
            assert torch.equal(function(*given), expected[0])
        assert function(*[t.double() for t in given]).dtype == torch.float64
    assert torch.equal(y, expected[0])
    assert all(torch.equal(g, e.float()) for g, e in zip(gradients, expected[1:], strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_backward_under_autocast_changes_nothing(name, device):
    """Not as for torch's own layers, whose products in the backward become 16 bits wide."""
    function, _ = FUNCTIONS[name]
    given = operands(name, (64,), torch.float32, device)
    dy = torch.randn_like(function(*given))
    expected = with_gradients(function, dy, given)[1:]
    leaves = [t.detach().requires_grad_() for t in given]
    y = function(*leaves)
    with torch.autocast(device.type, torch.bfloat16):
        gradients = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        again = torch.autograd.grad(y, leaves, dy, create_graph=True)
    assert all(map(torch.equal, gradients, expected))
    torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("is_slow", [True, False], ids=["no arithmetic of 16 bits", "16 bits"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["dense", "gelu"])
def test_16_bits_on_both_kinds_of_cpu(dtype, name, is_slow, monkeypatch):
    monkeypatch.setattr(half_matmul, "_slow", HALVES if is_slow else ())
    seen = []

    class Linears(TorchFunctionMode):
        def __torch_function__(self, called, types, args=(), kwargs=None):
            if called is F.linear:
                seen.append(args[0].dtype)
            return called(*args, **(kwargs or {}))

    function, plain = FUNCTIONS[name]
    given = operands(name, (16,), dtype, "cpu", (32, 32, 8))
    dy = torch.randn_like(plain(*given))
    with Linears():
        actual = with_gradients(function, dy, given)
    assert seen
    assert {a.dtype for a in actual} == {dtype}
    assert torch.float32 in seen or not is_slow
    reference = lambda dy, *given: with_gradients(plain, dy, given)
    assert_as_accurate_as(reference, actual, dy, *given, ulps=4)


def test_a_processor_says_whether_it_has_float16(monkeypatch):
    class Probe:
        _is_mkldnn_fp16_supported = staticmethod(lambda: True)

    monkeypatch.setattr(torch.ops, "mkldnn", Probe)
    assert half_matmul.cpu_multiplies_float16()
    monkeypatch.setattr(Probe, "_is_mkldnn_fp16_supported", staticmethod(lambda: False))
    assert not half_matmul.cpu_multiplies_float16()
    monkeypatch.setattr(torch.ops, "mkldnn", object())  # a torch without oneDNN
    assert not half_matmul.cpu_multiplies_float16()


def test_a_processor_says_whether_it_has_bfloat16(monkeypatch):
    has = {"_is_avx512_bf16_supported": False, "_is_amx_tile_supported": False}
    for name in has:
        monkeypatch.setattr(torch.cpu, name, lambda name=name: has[name])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert not half_matmul.cpu_multiplies_bfloat16()
    monkeypatch.setattr(half_matmul, "cpu_multiplies_float16", lambda: True)
    assert half_matmul.slow_dtypes() == (torch.bfloat16,)
    for name in has:
        has[name] = True
        assert half_matmul.cpu_multiplies_bfloat16()
        has[name] = False
    monkeypatch.setattr("platform.machine", lambda: "aarch64")  # nobody measured it there
    assert half_matmul.cpu_multiplies_bfloat16()


def test_few_products_stay_as_they_are(monkeypatch):
    """Converting operands would take longer than multiplying them."""
    monkeypatch.setattr(half_matmul, "_slow", HALVES)
    asks = lambda rows, size, dtype: half_matmul.needs_float32(
        torch.ones(rows, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    )
    assert [asks(rows, 16, torch.float16) for rows in (16, 17)] == [False, True]
    assert [asks(rows, 64, torch.bfloat16) for rows in (8, 9)] == [False, True]
    assert asks(1, 128, torch.float16)
    assert not asks(100, 100, torch.float32)


MODULES = {
    "dense": (FusedDense(7, 12), ["weight", "bias"], F.linear),
    "no bias": (FusedDense(7, 12, bias=False), ["weight"], F.linear),
    "gelu": (
        FusedDenseGeluDense(7, 33, 12),
        ["weight1", "bias1", "weight2", "bias2"],
        gelu_dense,
    ),
    "gelu without biases": (
        FusedDenseGeluDense(7, 33, 12, bias=False),
        ["weight1", "weight2"],
        FUNCTIONS["gelu without biases"][1],
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name, device):
    layer, names, plain = MODULES[name]
    layer = copy.deepcopy(layer).to(device)
    parameters = dict(layer.named_parameters())
    assert list(parameters) == names
    for name, parameter in parameters.items():  # drawn as torch.nn.Linear draws them
        bound = 1 / (33 if name.endswith("2") else 7) ** 0.5
        assert 0 < parameter.abs().max() <= bound
    x = torch.randn(2, 3, 7, device=device)
    values = list(parameters.values())
    assert_as_accurate_as(plain, layer(x), x, *[v.detach() for v in values])
    before = values[0].clone()
    layer.reset_parameters()
    assert not torch.equal(before, values[0])
    assert f"bias={len(names) in (2, 4) and 'bias' in names[1]}" in repr(layer)
    x.requires_grad_()
    assert_compiles(lambda x: layer(x).sin(), x, ulps=4)  # the compiler orders sums as it likes


@pytest.mark.parametrize(("inside", "outside"), [(0, 3), (3, 0), (1, 1)])
def test_small_sizes(inside, outside, device):
    x = torch.randn(2, inside, device=device)
    for layer in (FusedDense(inside, outside), FusedDenseGeluDense(inside, outside, 2)):
        y = layer.to(device)(x)
        y.sum().backward()
        assert y.isfinite().all()
        assert all(p.grad.shape == p.shape for p in layer.parameters())


X, W, B = torch.ones(4, 6), torch.ones(3, 6), torch.ones(3)
BAD = {
    "integers": (TypeError, "input must be a float64", (X.int(), W.int(), B.int())),
    "no tensor": (TypeError, "input must be a float64.* got list", ([1.0], W, B)),
    "a number": (ValueError, "got a number", (X[0, 0], W, B)),
    "weight's dtype": (TypeError, "weight is torch.float16", (X, W.half(), B)),
    "no weight": (TypeError, "weight is float", (X, 1.0, B)),
    "bias's dtype": (TypeError, "bias is torch.float64", (X, W, B.double())),
    "no bias tensor": (TypeError, "bias is float", (X, W, 1.0)),
    "shapes": (ValueError, r"weight must have shape \[out_features, 6\]", (X, W[:, :5], B)),
    "a vector": (ValueError, r"weight must have shape", (X, W[0], None)),
    "bias's shape": (ValueError, r"bias must have shape \[3\]", (X, W, B[:1])),
    "bias's rank": (ValueError, r"bias must have shape \[3\]", (X, W, B[None])),
    "device": (ValueError, "weight is on meta", (X, W.to("meta"), B)),
    "bias's device": (ValueError, "bias is on meta", (X, W, B.to("meta"))),
}


@pytest.mark.parametrize("grad_enabled", [True, False])
@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD)
def test_bad_input(error, text, given, grad_enabled):
    """With the same words where torch checks most of it."""
    with torch.set_grad_enabled(grad_enabled), pytest.raises(error, match=f"function: .*{text}"):
        fused_dense_function(*given)


def test_bad_input_of_two_layers():
    for error, text, given in [
        (ValueError, r"weight2 must have shape \[out_features, 3\]", (X, W, B, W, B)),
        (TypeError, "bias2 is torch.float16", (X, W, B, W[:, :3], B.half())),
        (ValueError, r"bias1 must have shape \[3\]", (X, W, B[:2], W[:, :3], B)),
    ]:
        with pytest.raises(error, match=f"fused_dense_gelu_dense_function: {text}"):
            fused_dense_gelu_dense_function(*given)


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_errors_name_what_was_called(grad_enabled):
    calls = {
        "FusedDense": FusedDense(5, 3),
        "FusedDenseGeluDense": FusedDenseGeluDense(5, 3, 2),
        "FusedDenseFunc": lambda x: FusedDenseFunc.apply(x, W[:, :5], B),
        "DenseNoBiasFunc": lambda x: DenseNoBiasFunc.apply(x, W[:, :5]),
        "FusedDenseGeluDenseFunc": lambda x: FusedDenseGeluDenseFunc.apply(x, W[:, :5], B, W, B),
        "fused_dense_function": lambda x: fused_dense_function(x, W[:, :5], None),
        "dense_no_bias_function": lambda x: dense_no_bias_function(x, W[:, :5]),
    }
    for name, call in calls.items():
        with (
            torch.set_grad_enabled(grad_enabled),
            pytest.raises(
                ValueError, match=rf"^{name}: weight1? must have shape \[out_features, 4\]"
            ),
        ):
            call(torch.ones(2, 4))


def test_names_of_apex(device):
    assert module._fused_dense is fused_dense_function
    assert module._dense_no_bias is dense_no_bias_function
    assert module._fused_dense_gelu_dense is fused_dense_gelu_dense_function
    for function, of_apex, name in [
        (fused_dense_function, FusedDenseFunc, "dense"),
        (dense_no_bias_function, DenseNoBiasFunc, "no bias"),
        (fused_dense_gelu_dense_function, FusedDenseGeluDenseFunc, "gelu"),
    ]:
        given = operands(name, (5,), torch.float32, device)
        assert torch.equal(of_apex.apply(*given), function(*given))
        assert torch.equal(of_apex.forward(None, *given), function(*given))
        parameters = list(inspect.signature(function).parameters)
        assert inspect.getfullargspec(of_apex.forward).args == ["ctx", *parameters]
        with torch.autocast(device.type, torch.bfloat16):
            assert of_apex.apply(*given).dtype == torch.float32


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [(16,), (4, 4)], ids=str)
def test_extension_module(rows, dtype, device):
    import fused_dense_cuda as legacy

    x, w1, b1, w2, b2 = operands("gelu", rows, dtype, device, (32, 24, 8))
    dy = torch.randn(*rows, 24, device=device).to(dtype)
    y, *gradients = with_gradients(F.linear, dy.double(), [t.double() for t in (x, w1, b1)])
    close = lambda a, e: torch.testing.assert_close(
        a.double(), e, rtol=0, atol=8 * torch.finfo(dtype).eps * e.abs().max().item()
    )
    with torch.autocast(device.type, torch.bfloat16):
        close(legacy.linear_bias_forward(x, w1, b1), y)
        actual = legacy.linear_bias_backward(x, w1, dy)
    for a, e in zip(actual, gradients, strict=True):
        close(a, e)
    dy = torch.randn(*rows, 8, device=device).to(dtype)
    given = [t.double() for t in (x, w1, b1, w2, b2)]
    y, *gradients = with_gradients(gelu_dense, dy.double(), given)
    with torch.autocast(device.type, torch.bfloat16):
        output1, output2, gelu_in = legacy.linear_gelu_linear_forward(x, w1, b1, w2, b2)
        actual = legacy.linear_gelu_linear_backward(x, gelu_in, output1, w1, w2, dy)
    close(output2, y)
    close(output1, F.gelu(gelu_in.double(), approximate="tanh"))
    for a, e in zip(actual, gradients, strict=True):
        close(a, e)
        assert not a.requires_grad
    with pytest.raises(ValueError, match="linear_bias_backward: d_output must be"):
        legacy.linear_bias_backward(x, w1, dy)
    with pytest.raises(ValueError, match="linear_gelu_linear_backward: gelu_in must be"):
        legacy.linear_gelu_linear_backward(x, x, output1, w1, w2, dy)
    with pytest.raises(TypeError, match=r"linear_bias_forward: bias is torch\.int32"):
        legacy.linear_bias_forward(x, w1, b1.int())


def test_weight_gradients_at_their_older_place(monkeypatch):
    extension = pytest.importorskip("fused_dense_cuda")
    pytest.importorskip("fused_weight_gradient_mlp_cuda", reason="apex-parallel is not installed")
    x, dy = torch.ones(3, 2), torch.ones(3, 4)
    for name, dtype in (("wgrad_gemm_accum_fp32", x.dtype), ("wgrad_gemm_accum_fp16", torch.half)):
        gradient = torch.ones(4, 2, dtype=dtype)
        getattr(extension, name)(x.to(dtype), dy.to(dtype), gradient)
        assert torch.equal(gradient, torch.full_like(gradient, 4))
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", None)
    with pytest.raises(RuntimeError, match="pip install apex-parallel"):
        extension.wgrad_gemm_accum_fp32(x, dy, torch.zeros(4, 2))
