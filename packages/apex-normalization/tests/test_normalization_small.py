"""Layer norm at sizes where a call costs more than its rows: accurate, and one kernel for all."""

import copy
import pickle

import pytest
import torch

from apex.normalization import FusedLayerNorm, MixedFusedLayerNorm
from apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    fused_layer_norm,
    fused_layer_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    ops,
)
from apex_testkit import FLOATS, assert_as_accurate_as

EPS = 1e-5
SHAPES = [(9, 16), (3, 31), (2, 2, 768), (64, 64), (2, 4096)]
SHAPES += [(1, 65_537), (1024, 7), (1025, 7), (1024, 256), (1, 262_144), (5, 52_429)]


def formula(x, weight, bias):
    deviation = x - x.mean(-1, keepdim=True)
    xhat = deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + EPS)
    return xhat * weight + bias


def outputs_and_grads(norm, x, weight, bias, dy):
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = norm(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


def check_accuracy(norm, x, weight, bias, dy):
    actual = outputs_and_grads(norm, x, weight, bias, dy)
    assert [t.dtype for t in actual] == [t.dtype for t in (weight, x, weight, weight)]
    assert all(t.is_contiguous() for t in actual)
    reference = lambda *args: outputs_and_grads(formula, *args)
    # Three in float64, whose truth errs as well where many rows are added.
    ulps = 3.0 if x.dtype == torch.float64 else 1.0
    assert_as_accurate_as(reference, actual, x, weight, bias, dy, ulps=ulps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accurate(shape, dtype, device):
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
@pytest.mark.parametrize("shape", [(64, 1024), (1024, 64), (3, 31)], ids=str)
def test_16_bits_without_gradients(shape, dtype, device):
    """As accurate far from zero, where torch's gradients are not."""
    for offset in (0, 30):
        x = (torch.randn(shape, device=device) + offset).to(dtype)
        weight, bias = torch.randn(2, shape[-1], device=device, dtype=dtype)
        with torch.no_grad():
            y = fused_layer_norm_affine(x, weight, bias, shape[-1], EPS)
        assert_as_accurate_as(formula, y, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_with_frozen_weights(dtype, device):
    x, dy = torch.randn(2, 64, 512, device=device)
    x, dy = (x + 30).to(dtype).requires_grad_(), dy.to(dtype)
    weight, bias = torch.randn(2, 512, device=device, dtype=dtype)
    y = fused_layer_norm_affine(x, weight, bias, 512, EPS)
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
    efficient = FusedLayerNorm(64, EPS, memory_efficient=True).to(device)
    for other in (mixed, efficient):
        other.load_state_dict(module.state_dict())
    norms = [
        module,
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        mixed,
        lambda x: fused_layer_norm_affine(x, module.weight, module.bias, 64, EPS),
        lambda x: mixed_dtype_fused_layer_norm_affine(x, module.weight, module.bias, [64], EPS),
        lambda x: FusedLayerNormAffineFunction.apply(x, module.weight, module.bias, 64, EPS),
        efficient,
        lambda x: fused_layer_norm(x, 64, EPS) * module.weight + module.bias,
    ]
    for norm in norms:
        y = norm(x)
        torch.testing.assert_close(y, module(x))
        assert torch.equal(y, module(x)) or norm is norms[-1]
        with torch.no_grad():
            assert torch.equal(norm(x), y)
    assert fused_layer_norm(x, 64).grad_fn is not None
    transposed = torch.randn(64, 3, device=device).t()
    assert module(transposed).is_contiguous()
    assert torch.equal(module(transposed), module(transposed.contiguous()))


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
    batch = torch.export.Dim("batch")
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
    "no columns": (ValueError, "each of size 1 or more", (X[:, :0], W[:0], None, 0)),
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
