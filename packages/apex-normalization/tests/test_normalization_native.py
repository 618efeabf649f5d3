"""Layer norm of small tensors on the CPU is torch's: which, and that all are right."""

import copy
import pickle

import pytest
import torch

from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm
from apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    fused_layer_norm,
    fused_layer_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    native,
    ops,
)
from apex_testkit import FLOATS, assert_as_accurate_as
from apex_testkit.devices import runs_gpu_kernels

EPS = 1e-5
ELEMENTS, NARROW_ELEMENTS, ROWS = 262_144, 65_536, 1024
# On either side of the limits.
SHAPES = [(9, 16), (3, 31), (2, 2, 768), (64, 64), (2, 4096)]
SHAPES += [(1, NARROW_ELEMENTS), (1, NARROW_ELEMENTS + 1)]
SHAPES += [(ROWS, 7), (ROWS + 1, 7), (ROWS, 256), (1, ELEMENTS), (5, ELEMENTS // 5 + 1)]


def is_torchs(x, weight):
    """Whether this call, of tensors that want gradients, goes to torch's kernel."""
    rows = x.numel() // x.shape[-1]
    if runs_gpu_kernels(x.device) or rows > ROWS:
        return False
    if x.dtype.itemsize != 2:
        return x.numel() <= ELEMENTS
    return x.numel() <= NARROW_ELEMENTS and (rows == 1 or weight.dtype != x.dtype)


def test_limits():
    actual = (native.ELEMENTS, native.NARROW_ELEMENTS, native.ROWS)
    assert actual == (ELEMENTS, NARROW_ELEMENTS, ROWS)


def served_by_torch(y):
    node = y.grad_fn
    if node is not None and "ToCopy" in type(node).__name__:  # to 16 bits
        node = node.next_functions[0][0]
    return "NativeLayerNorm" in type(node).__name__


def formula(x, weight, bias):
    deviation = x - x.mean(-1, keepdim=True)
    xhat = deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + EPS)
    return xhat * weight + bias


def outputs_and_grads(norm, x, weight, bias, dy):
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = norm(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


def check_accuracy(norm, x, weight, bias, dy):
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    assert served_by_torch(norm(*leaves)) == is_torchs(x, weight)
    actual = outputs_and_grads(norm, x, weight, bias, dy)
    assert [t.dtype for t in actual] == [t.dtype for t in (weight, x, weight, weight)]
    assert all(t.is_contiguous() for t in actual)
    reference = lambda *args: outputs_and_grads(formula, *args)
    assert_as_accurate_as(lambda *a: reference(*a)[:2], actual[:2], x, weight, bias, dy)
    # torch adds rows one by one: rounding errors add up as the root of their number.
    rows = x.numel() // x.shape[-1]
    ulps = max(1.0, rows**0.5 / 3) if is_torchs(x, weight) else 1.0
    assert_as_accurate_as(lambda *a: reference(*a)[2:], actual[2:], x, weight, bias, dy, ulps=ulps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_sides_are_accurate(shape, dtype, device):
    x, dy = torch.randn(2, *shape, device=device, dtype=dtype)
    weight, bias = torch.randn(2, shape[-1], device=device, dtype=dtype)
    check_accuracy(
        lambda *args: fused_layer_norm_affine(*args, shape[-1], EPS), x, weight, bias, dy
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 768), (4, 768), (64, 64), (64, 256)], ids=str)
def test_16_bit_rows_far_from_zero(shape, dtype, device):
    """The same tolerance: torch's own 16-bit gradients are off by more than ten times that."""
    x, dy = torch.randn(2, *shape, device=device)
    x, dy = (x + 30).to(dtype), dy.to(dtype)
    weight, bias = torch.randn(2, shape[-1], device=device, dtype=dtype)
    check_accuracy(
        lambda *args: fused_layer_norm_affine(*args, shape[-1], EPS), x, weight, bias, dy
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_input_of_float32_weights(dtype, device):
    for shape in [(1, 768), (4, 768), (64, 1024), (65, 1024)]:
        x = torch.randn(shape, device=device).to(dtype)
        dy = torch.randn(shape, device=device)
        weight, bias = torch.randn(2, shape[-1], device=device)
        norm = lambda *args: mixed_dtype_fused_layer_norm_affine(*args, args[0].shape[-1], EPS)
        check_accuracy(norm, x, weight, bias, dy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 1024), (ROWS, 64), (3, 31)], ids=str)
def test_16_bits_without_gradients(shape, dtype, device):
    """As accurate far from zero, where torch's gradients are not."""
    for offset in (0, 30):
        x = (torch.randn(shape, device=device) + offset).to(dtype)
        weight, bias = torch.randn(2, shape[-1], device=device, dtype=dtype)
        with torch.no_grad():
            y = fused_layer_norm_affine(x, weight, bias, shape[-1], EPS)
            served = native.layer_norm(x, weight, bias, shape[-1:], EPS)
        assert (served is None) == runs_gpu_kernels(x.device)
        assert_as_accurate_as(formula, y, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_with_frozen_weights(dtype, device):
    x, dy = torch.randn(2, 64, 512, device=device)
    x, dy = (x + 30).to(dtype).requires_grad_(), dy.to(dtype)
    weight, bias = torch.randn(2, 512, device=device, dtype=dtype)
    y = fused_layer_norm_affine(x, weight, bias, 512, EPS)
    assert served_by_torch(y) != runs_gpu_kernels(x.device)
    actual = (y.detach(), *torch.autograd.grad(y, x, dy))

    def reference(x, weight, bias, dy):
        x = x.detach().requires_grad_()
        y = formula(x, weight, bias)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    assert_as_accurate_as(reference, actual, x, weight, bias, dy)


@pytest.mark.parametrize("names", [("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_module_with_parametrized_weights(names, device):
    """They are then no parameters of the module, but properties."""
    module = FusedLayerNorm(64).to(device)
    for name in names:
        double = torch.nn.Module()
        double.forward = lambda value: 2 * value + 1
        torch.nn.utils.parametrize.register_parametrization(module, name, double)
    x = torch.randn(3, 64, device=device)
    torch.testing.assert_close(module(x), formula(x, module.weight, module.bias))


def test_every_entrance(device):
    """The modules and functions, with gradients or without, give the bits of one kernel."""
    x = torch.randn(3, 64, device=device, requires_grad=True)
    module = FusedLayerNorm(64, EPS).to(device)
    torch.nn.init.normal_(module.weight)
    mixed = MixedFusedLayerNorm(64, EPS).to(device)
    mixed.load_state_dict(module.state_dict())
    norms = [
        module,
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        mixed,
        lambda x: fused_layer_norm_affine(x, module.weight, module.bias, 64, EPS),
        lambda x: mixed_dtype_fused_layer_norm_affine(x, module.weight, module.bias, [64], EPS),
        lambda x: fused_layer_norm(x, 64, EPS) * module.weight + module.bias,
    ]
    for norm in norms:
        y = norm(x)
        assert served_by_torch(y) == is_torchs(x, module.weight) or norm is norms[-1]
        torch.testing.assert_close(y, module(x))
        with torch.no_grad():
            assert torch.equal(norm(x), y)
    assert fused_layer_norm(x, 64).grad_fn is not None
    transposed = torch.randn(64, 3, device=device).t()
    assert module(transposed).is_contiguous()
    assert torch.equal(module(transposed), module(transposed.contiguous()))


def stays(x=(2, 64), dtype=torch.float32, weight=torch.float32, **options):
    """A call that must not go to torch."""

    def call():
        module = FusedLayerNorm(64, dtype=weight, **options)
        values = torch.randn(x, dtype=dtype)
        if weight != dtype:
            arguments = (module.weight, module.bias, 64)
            return mixed_dtype_fused_layer_norm_affine(values, *arguments)
        return module(values)

    return call


def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        y = FusedLayerNorm(64)(torch.randn(2, 64))
    assert y.dtype == torch.bfloat16
    return y


def of_the_class():
    weight = torch.ones(64, requires_grad=True)
    return FusedLayerNormAffineFunction.apply(torch.randn(2, 64), weight, None, 64, EPS)


OURS_BY_KIND = {
    "mixed dtypes, float64": stays(dtype=torch.float64),
    "mixed dtypes, narrow weight": stays(weight=torch.bfloat16),
    "memory_efficient": stays(memory_efficient=True),
    "autocast": autocast,
    "autograd class": of_the_class,
    "RMS": lambda: FusedRMSNorm(64)(torch.randn(2, 64)),
}


@pytest.mark.parametrize("call", OURS_BY_KIND.values(), ids=OURS_BY_KIND.keys())
def test_what_stays_ours(call):
    y = call()
    assert not served_by_torch(y)
    nodes = [y.grad_fn]
    while "fused" not in type(nodes[-1]).__name__:  # behind the cast to the result's dtype
        nodes.append(nodes[-1].next_functions[0][0])
    assert len(nodes) <= 2


def test_compiled_code_keeps_our_operators(device):
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    module = FusedLayerNorm(64).to(device)
    x = torch.randn(2, 64, device=device)
    with torch.no_grad():
        y = torch.compile(module, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(y, module(x))
    assert any("apex_normalization.layer_norm_forward" in target for target in seen)
    batch = torch.export.Dim("batch")  # of any size: none of these limits becomes a guard
    program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},))
    assert program.module()(torch.cat([x] * 9)).shape == (18, 64)
    assert ops.layer_norm_forward in [node.target for node in program.graph.nodes]


def test_higher_derivatives_and_transforms(device):
    x = torch.randn(2, 32, device=device, dtype=torch.float64, requires_grad=True)
    weight, bias = (t.requires_grad_() for t in torch.randn(2, 32, device=device).double())
    norm = lambda *args: fused_layer_norm_affine(*args, 32, EPS)
    assert torch.autograd.gradcheck(norm, (x, weight, bias))
    assert torch.autograd.gradgradcheck(norm, (x, weight, bias))
    loss = lambda norm: lambda row: norm(row, weight, bias).sin().sum()
    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.hessian):
        actual = torch.func.vmap(transform(loss(norm)))(x)
        expected = torch.func.vmap(transform(loss(formula)))(x)
        torch.testing.assert_close(actual, expected)


def test_kept_for_the_backward(device):
    """No more than our function keeps: input, weight and two numbers a row."""
    elements = []
    x = torch.randn(3, 64, device=device, requires_grad=True)
    module = FusedLayerNorm(64).to(device)
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: elements.append((t.data_ptr(), t.numel())), lambda t: t):
        module(x)
    assert sum(dict(elements).values()) <= x.numel() + 2 * 64 + 2 * 3


X, W = torch.randn(2, 33), torch.randn(33)
REFUSALS = {
    "shape": (ValueError, r"normalized_shape is \[5\]", (X, W[:5], None, 5)),
    "weight's shape": (ValueError, "weight has shape", (X, W[:5], None, 33)),
    "bias alone": (ValueError, "bias was given without", (X, None, W, 33)),
    "dtype": (TypeError, "weight is float64", (X, W.double(), None, 33)),
    "no columns": (ValueError, "each of size 1 or more", (X[:, :0], W[:0], None, 0)),
    "16-bit input": (TypeError, "weight is float32", (X.half(), W, None, 33)),
    "bias's dtype": (TypeError, "bias is float64", (X, W, W.double(), 33)),
    "integers": (TypeError, "must be a float64", (X.long(), W.long(), None, 33)),
    "list": (TypeError, "weight must be", (X, [1.0] * 33, None, 33)),
    "eps": (ValueError, "eps must be finite", (X, W, None, 33, -1.0)),
    "no eps": (TypeError, "eps must be a number", (X, W, None, 33, None)),
    "no shape": (ValueError, "at least one dimension", (X, W, None, ())),
}


@pytest.mark.parametrize(("error", "text", "arguments"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_are_ours(error, text, arguments):
    with pytest.raises(error, match=text):
        fused_layer_norm_affine(*arguments)
