"""apex.mlp against dense layers of PyTorch in float64."""

import copy
import importlib
import io
import itertools
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from apex.contrib._shared.native import half_matmul
from apex.contrib.dense_epilogue import decompositions, dense_activation_backward
from apex.mlp import MLP, MlpFunction, mlp_function
from apex_testkit import FLOATS, assert_as_accurate_as, assert_compiles
from apex_testkit.formulas import CHECKS, Case

HALVES = torch.float16, torch.bfloat16

ACTIVATIONS = {"none": (0, lambda x: x), "relu": (1, torch.relu), "sigmoid": (2, torch.sigmoid)}


def oracle_of(activation, has_bias):
    def oracle(x, *parameters):
        count = len(parameters) // (1 + has_bias)
        for i, weight in enumerate(parameters[:count]):
            x = activation(F.linear(x, weight, parameters[count + i] if has_bias else None))
        return x

    return oracle


def operands(sizes, rows, dtype, device, has_bias=True):
    """Input, weights, biases, as a trained network has them: not larger than the layers sum."""
    weights = [
        torch.randn(b, a, device=device) / max(a, 1) ** 0.5 for a, b in itertools.pairwise(sizes)
    ]
    biases = [torch.randn(size, device=device) for size in sizes[1:]] if has_bias else []
    x = torch.randn(*rows, sizes[0], device=device)
    return [t.to(dtype) for t in (x, *weights, *biases)]


def with_gradients(function, dy, given):
    given = [t.detach().requires_grad_() for t in given]
    y = function(*given)
    return y.detach(), *torch.autograd.grad(y, given, dy)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("rows", [(5,), (0,), (1,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, rows, name, has_bias, device):
    number, activation = ACTIVATIONS[name]
    given = operands([7, 33, 5, 12], rows, dtype, device, has_bias)
    dy = torch.randn(*rows, 12, device=device).to(dtype)
    actual = with_gradients(lambda *g: mlp_function(has_bias, number, *g), dy, given)
    reference = lambda dy, *given: with_gradients(oracle_of(activation, has_bias), dy, given)
    # Every layer's result is rounded in each direction, to an ulp of the largest element.
    assert_as_accurate_as(reference, actual, dy, *given, ulps=3)
    assert [g.dtype for g in actual[1:]] == [t.dtype for t in given]
    assert actual[0].shape == (*rows, 12)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_layout(dtype, device):
    given = operands([6, 8, 4], (5,), dtype, device)
    ones = torch.ones((), device=device, dtype=dtype).expand(5, 4)
    expected = with_gradients(lambda *g: mlp_function(1, 1, *g), ones, given)
    strided = [torch.stack([t, t], -1)[..., 0] for t in given]
    transposed = [t.t().contiguous().t() if t.dim() == 2 else t for t in given]
    for laid_out in (strided, transposed):
        dy = torch.ones(4, 5, device=device, dtype=dtype).t()
        actual = with_gradients(lambda *g: mlp_function(1, 1, *g), dy, laid_out)
        unit = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(actual, expected, rtol=unit, atol=4 * unit)


def case(name, has_bias):
    number, activation = ACTIVATIONS[name]
    return Case(
        lambda *given: mlp_function(has_bias, number, *given),
        lambda dtype, device: tuple(operands([6, 5], (4,), dtype, device, has_bias)),
        oracle_of(activation, has_bias),
        grads=(0, 1, 2)[: 2 + has_bias],
        rows=(0,),
        operators=(torch.ops.aten.addmm.default, dense_activation_backward),
        decompositions=decompositions,
        ulps=4,  # truth rounds as often: sums of six products, and the activation
        without={"batch invariance": "torch's matrix products choose by size"},
        keeps_output="" if name == "none" else "The gradient of the activation is read off it.",
    )


CASES = {name: case(name, True) for name in ("relu", "sigmoid")}
# An addmm is no operator of ours that decomposes; test_dense_epilogue.py has those that do.
SERVED = {name: check for name, check in CHECKS.items() if name != "decompositions"}


@pytest.mark.parametrize("check", SERVED.values(), ids=SERVED)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_composed(case, check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    if check is CHECKS["export"]:
        case = replace(case, operators=(torch.ops.aten.linear.default, None))
    check(case, device)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_second_derivatives_of_layers(name, device):
    number = ACTIVATIONS[name][0]
    for has_bias in (True, False):
        given = operands([3, 4, 2], (2,), torch.float64, device, has_bias)
        given = [t.requires_grad_() for t in given]
        function = lambda *given, has_bias=has_bias: mlp_function(has_bias, number, *given)
        assert torch.autograd.gradcheck(function, given)
        assert torch.autograd.gradgradcheck(function, given)


def test_compiles_whole(device):
    mlp = MLP([6, 8, 4]).to(device)
    x = torch.randn(5, 6, device=device, requires_grad=True)
    assert_compiles(lambda x: mlp(x).sin(), x, ulps=4)  # the compiler orders sums as it likes


@pytest.mark.parametrize("wanted", [[0], [1], [2], [3], [4], [0, 4], [2, 3]], ids=str)
@pytest.mark.parametrize("number", [0, 1])
def test_only_what_is_needed(number, wanted, device):
    given = operands([6, 8, 4], (5,), torch.float32, device)
    dy = torch.randn(5, 4, device=device)
    expected = with_gradients(lambda *g: mlp_function(1, number, *g), dy, given)[1:]
    given = [t.requires_grad_(i in wanted) for i, t in enumerate(given)]
    mlp_function(1, number, *given).backward(dy)
    assert [i for i, t in enumerate(given) if t.grad is not None] == wanted
    for i in wanted:
        torch.testing.assert_close(given[i].grad, expected[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_first_and_stays_outside(dtype, device):
    given = operands([16, 32, 8], (64,), torch.float32, device)
    dy = torch.randn(64, 8, device=device)
    call = lambda *given: mlp_function(1, 1, *given)
    expected = with_gradients(call, dy.to(dtype), [t.to(dtype) for t in given])
    leaves = [t.detach().requires_grad_() for t in given]
    with torch.autocast(device.type, dtype):
        y = call(*leaves)
        gradients = torch.autograd.grad(y, leaves, dy.to(dtype))
    assert torch.equal(y, expected[0])
    assert all(torch.equal(g, e.float()) for g, e in zip(gradients, expected[1:], strict=True))


def test_a_backward_under_autocast_changes_nothing(device):
    """Not as for torch's own layers, whose products in the backward become 16 bits wide."""
    given = operands([16, 32, 8], (64,), torch.float32, device)
    dy = torch.randn(64, 8, device=device)
    expected = with_gradients(lambda *g: mlp_function(1, 1, *g), dy, given)[1:]
    leaves = [t.detach().requires_grad_() for t in given]
    y = mlp_function(1, 1, *leaves)
    with torch.autocast(device.type, torch.bfloat16):
        assert all(map(torch.equal, torch.autograd.grad(y, leaves, dy), expected))
    y = MlpFunction.apply(1, 1, *leaves)
    with torch.autocast(device.type, torch.bfloat16):
        again = torch.autograd.grad(y, leaves, dy, create_graph=True)
        assert torch.equal(MlpFunction.apply(1, 1, *leaves), y)
    torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("is_slow", [True, False], ids=["no arithmetic of 16 bits", "16 bits"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bits_on_both_kinds_of_cpu(dtype, is_slow, monkeypatch):
    monkeypatch.setattr(half_matmul, "_slow", HALVES if is_slow else ())
    seen = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *w: seen.append(x.dtype) or linear(x, *w))
    given = operands([32, 32, 8], (16,), dtype, "cpu")
    y = mlp_function(1, 1, *given)
    assert y.dtype == dtype
    assert set(seen) == {torch.float32 if is_slow else dtype}
    assert_as_accurate_as(oracle_of(torch.relu, True), y, *given)
    seen.clear()
    mlp_function(1, 1, *[t[:2, :2] if t.dim() == 2 else t[:2] for t in given])
    assert set(seen) == {dtype}  # for a few products torch's loops are quicker


def test_module(device):
    torch.manual_seed(0)
    mlp = MLP([400, 300, 200]).to(device)
    assert [n for n, _ in mlp.named_parameters()] == ["weight_0", "bias_0", "weight_1", "bias_1"]
    assert mlp.weight_1.shape == (200, 300)
    torch.testing.assert_close(mlp.weight_0.std().item(), (2 / 700) ** 0.5, rtol=0.05, atol=0)
    torch.testing.assert_close(mlp.bias_0.std().item(), (1 / 300) ** 0.5, rtol=0.2, atol=0)
    before = mlp.weight_0.clone()
    mlp.reset_parameters()
    assert not torch.equal(before, mlp.weight_0)
    assert "[400, 300, 200]" in repr(mlp)
    twin = copy.deepcopy(mlp)
    with torch.no_grad():
        twin.weight_0.zero_()
    assert all(a is b for a, b in zip(twin.weights, (twin.weight_0, twin.weight_1), strict=True))
    assert twin.weights[0].abs().max() == 0 < mlp.weights[0].abs().max()
    x = torch.randn(3, 400, device=device)
    layers = oracle_of(torch.relu, True)
    assert_as_accurate_as(layers, mlp(x), x, *mlp.weights, *mlp.biases)
    assert MLP([4, 3], bias=False, activation="none").biases == []
    file = io.BytesIO()
    torch.save(mlp.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file))
    assert torch.equal(twin(x), mlp(x))


def test_backward_twice(device):
    mlp = MLP([6, 8, 4]).to(device)
    y = mlp(torch.randn(5, 6, device=device)).sum()
    y.backward(retain_graph=True)
    once = [p.grad.clone() for p in mlp.parameters()]
    y.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(mlp.parameters(), once, strict=True))


@pytest.mark.parametrize("sizes", [[0, 3], [3, 0, 2], [1, 1]], ids=str)
def test_small_sizes(sizes, device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mlp = MLP(sizes).to(device)
    x = torch.randn(2, sizes[0], device=device)
    y = mlp(x)
    y.sum().backward()
    torch.testing.assert_close(y, oracle_of(torch.relu, True)(x, *mlp.weights, *mlp.biases))
    assert all(p.grad.shape == p.shape for p in mlp.parameters())


X, W, B = torch.ones(4, 6), torch.ones(3, 6), torch.ones(3)
BAD = {
    "integers": (TypeError, "input must be a float64", (1, 1, X.int(), W, B)),
    "activation": (ValueError, "activation must be 0", (1, 3, X, W, B)),
    "a bias too few": (ValueError, "as many biases; got 4", (1, 1, X, W, W, B)),
    "no weight": (ValueError, "at least one weight", (0, 1, X)),
    "nothing": (ValueError, "got 0 arguments", (0, 1)),
    "a number": (ValueError, "got a number", (0, 1, X[0, 0], W)),
    "weight's dtype": (TypeError, r"weights\[0\] is torch.float16", (1, 1, X, W.half(), B)),
    "bias's dtype": (TypeError, r"biases\[0\] is torch.float64", (1, 1, X, W, B.double())),
    "no bias": (TypeError, r"biases\[0\] is None", (1, 1, X, W, None)),
    "no weight tensor": (TypeError, r"weights\[0\] is list", (1, 1, X, [1.0], B)),
    "shapes": (ValueError, r"weights\[1\] must have shape \[out_features, 3\]", (0, 0, X, W, W)),
    "a vector": (ValueError, r"weights\[0\] must have shape", (0, 0, X, W[0])),
    "bias's shape": (ValueError, r"biases\[0\] must have shape \[3\]", (1, 0, X, W, B[:1])),
    "device": (ValueError, r"weights\[0\] is on meta", (1, 1, X, W.to("meta"), B)),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD)
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"mlp_function: .*{text}"):
        mlp_function(*given)


def test_errors_name_what_was_called():
    for call, name in [
        (MLP([5, 3]), "MLP"),
        (lambda x: MlpFunction.apply(0, 1, x, W), "MlpFunction"),
    ]:
        with pytest.raises(ValueError, match=rf"^{name}: weights\[0\] must have shape \[out_feat"):
            call(torch.ones(2, 4))


def test_bad_module():
    with pytest.raises(TypeError, match="'none', 'relu' or 'sigmoid', got 'gelu'"):
        MLP([4, 3], activation="gelu")
    with pytest.raises(ValueError, match=r"at least one layer, got \[4\]"):
        MLP([4])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("has_bias", [1, 0])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_extension_module(number, has_bias, dtype, device):
    import mlp_cuda

    given = operands([32, 24, 8], (16,), dtype, device, has_bias)
    dy = torch.randn(16, 8, device=device).to(dtype)
    expected = with_gradients(lambda *g: mlp_function(has_bias, number, *g), dy, given)
    with torch.autocast(device.type, torch.bfloat16):
        outputs = mlp_cuda.forward(has_bias, number, given)
        gradients = mlp_cuda.backward(has_bias, number, dy, outputs, given)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(outputs[0], expected[0], rtol=4 * unit, atol=4 * unit)
    for actual, wanted in zip(gradients, expected[1:], strict=True):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(actual, wanted, rtol=0, atol=8 * unit * scale)
    assert not any(t.requires_grad for t in (*outputs, *gradients))
    with pytest.raises(ValueError, match="reserved"):
        mlp_cuda.backward(has_bias, number, dy, [outputs[0], outputs[1][:-1]], given)
    with pytest.raises(ValueError, match="grad_o must be"):
        mlp_cuda.backward(has_bias, number, dy[:3], outputs, given)
    with pytest.raises(TypeError, match=r"weights\[0\] is"):
        mlp_cuda.forward(has_bias, number, [given[0], given[1].int(), *given[2:]])


@pytest.mark.parametrize("module", ["mlp_cuda", "fused_dense_cuda"])
def test_import_error_where_kernels_cannot_run(module, monkeypatch):
    """So that `try: import ...; except ImportError:` of other projects finds its fallback."""
    from apex.contrib._ops import library

    monkeypatch.setattr(library, "manifest", dict)
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.setenv("APEX_JIT", "0")
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=r"neither prebuilt .* APEX_JIT=0"):
        importlib.import_module(module)


def test_without_activation_the_output_may_be_changed_in_place():
    torch.manual_seed(0)
    mlp, x = MLP([8, 6, 4], activation="none"), torch.randn(3, 8)
    gradients = [
        torch.autograd.grad(change(mlp(x)).sum(), list(mlp.parameters()))
        for change in (torch.relu_, torch.relu)
    ]
    torch.testing.assert_close(*gradients)


def test_subclasses_may_have_other_weights():
    class Scaled(MLP):
        @property
        def weights(self):
            return [2 * weight for weight in super().weights]

    module, x = Scaled([4, 3], bias=False, activation="none"), torch.randn(2, 4)
    torch.testing.assert_close(module(x), x @ (2 * module.weight_0).t())
