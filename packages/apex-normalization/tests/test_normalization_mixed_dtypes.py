"""Norms whose input and weight have different dtypes: what comes out, and how exact it is."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedRMSNorm
from apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    FusedRMSNormAffineFunction,
    fused_layer_norm_affine,
    fused_rms_norm_affine,
)
from apex_testkit import FLOATS, HALVES, assert_as_accurate_as, assert_compiles

EPS = 1e-5
PAIRS = [pair for pair in itertools.product(FLOATS, FLOATS) if pair[0] != pair[1]]


def layer_formula(x, weight, bias):
    deviation = x - x.mean(-1, keepdim=True)
    return deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + EPS) * weight + bias


def rms_formula(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


NORMS = {
    "layer": (lambda *given, **o: fused_layer_norm_affine(*given, 33, EPS, **o), layer_formula),
    "rms": (lambda *given, **o: fused_rms_norm_affine(*given, 33, EPS, **o), rms_formula),
}


def operands(name, dtypes, device):
    x_dtype, weight_dtype = dtypes
    x = torch.randn(5, 33, device=device).to(x_dtype)
    weight, bias = (torch.rand(2, 33, device=device) + 0.5).to(weight_dtype)
    return (x, weight, bias) if name == "layer" else (x, weight)


def expected_dtype(x_dtype, weight_dtype):
    """torch's, which is the input's; but the weight's where that has 16 bits and the input more."""
    return weight_dtype if weight_dtype in HALVES and x_dtype not in HALVES else x_dtype


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "efficient"])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_functions(dtypes, name, memory_efficient, device):
    norm, formula = NORMS[name]
    given = operands(name, dtypes, device)
    leaves = [t.requires_grad_() for t in given]
    y = norm(*leaves, memory_efficient=memory_efficient)
    assert y.dtype == expected_dtype(*dtypes)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, leaves, dy)
    assert [g.dtype for g in grads] == [t.dtype for t in given]
    if memory_efficient:  # which loses digits by design
        return

    def of(*values):
        *values, dy = values
        leaves = [v.detach().requires_grad_() for v in values]
        y = formula(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    # Two: a result of another dtype than the kernel's is rounded once more, and dy is a result.
    widest = torch.promote_types(*dtypes)
    exact = [t.detach().to(widest) for t in (*given, dy)]
    assert_as_accurate_as(of, (y.detach(), *grads), *exact, ulps=2)


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm])
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_modules(dtypes, kind, device):
    """Of a module, of a function, of Apex's class: the same bits; and compiled."""
    x_dtype, weight_dtype = dtypes
    module = kind(33, EPS, device=device, dtype=weight_dtype)
    x = torch.randn(4, 33, device=device).to(x_dtype).requires_grad_()
    y = module(x)
    assert y.dtype == expected_dtype(*dtypes)
    y.sum().backward()
    assert (x.grad.dtype, module.weight.grad.dtype) == dtypes
    function = (
        FusedLayerNormAffineFunction if kind is FusedLayerNorm else FusedRMSNormAffineFunction
    )
    assert torch.equal(function.apply(x, *module.parameters(), (33,), EPS), y)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)(x)
    assert compiled.dtype == y.dtype
    assert torch.equal(compiled, y)


@pytest.mark.parametrize("x_dtype", HALVES, ids=str)
def test_16_bit_input_with_float32_weights_as_torch(x_dtype):
    """The one pair that torch's layer_norm takes on every device."""
    x, weight = torch.randn(3, 33, dtype=x_dtype), torch.randn(33)
    assert F.layer_norm(x, (33,), weight, weight).dtype == x_dtype
    assert fused_layer_norm_affine(x, weight, weight, 33).dtype == x_dtype
    assert F.rms_norm(x, (33,), weight).dtype == fused_rms_norm_affine(x, weight, 33).dtype


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_mixed_module_agrees_but_for_the_last_rounding(zero_centered_gamma, device):
    x = torch.randn(4, 33, device=device).half()
    options = {"zero_centered_gamma": zero_centered_gamma}
    plain, mixed = FusedRMSNorm(33, **options), MixedFusedRMSNorm(33, **options)
    torch.nn.init.normal_(plain.weight)
    mixed.load_state_dict(plain.state_dict())
    plain, mixed = plain.to(device), mixed.to(device)
    assert mixed(x).dtype == torch.float32
    assert torch.equal(plain(x), mixed(x).half())


class FeedForward(torch.nn.Module):
    """T5's in float16, whose last layer stays float32: the norm behind it gets float32."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.last_norm = norm(16).half(), norm(16).half()
        self.wi = torch.nn.Linear(16, 32, bias=False).half()
        self.wo = torch.nn.Linear(32, 16, bias=False)

    def forward(self, x):
        for _ in range(2):
            x = x + self.wo(self.wi(self.norm(x)).relu().float())
        return self.last_norm(x)


@pytest.mark.parametrize("norm", [FusedRMSNorm, MixedFusedRMSNorm, FusedLayerNorm])
def test_t5_in_float16(norm):
    y = FeedForward(norm)(torch.randn(3, 16).half())
    assert y.dtype == torch.float16
    y.sum().backward()


def test_the_bias_has_the_weights_dtype():
    x, weight = torch.randn(2, 33), torch.ones(33)
    with pytest.raises(TypeError, match="bias is float16, but weight is float32; cast one of them"):
        fused_layer_norm_affine(x.half(), weight, weight.half(), 33)
    with pytest.raises(TypeError, match="weight must be a floating-point tensor, got int64"):
        fused_rms_norm_affine(x.half(), weight.long(), 33)


def test_compiled_with_gradients(device):
    module = FusedRMSNorm(33).to(device)
    assert_compiles(module, torch.randn(4, 33, device=device).half().requires_grad_())
