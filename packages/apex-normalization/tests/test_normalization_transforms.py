"""torch.func, alone and compiled, and second derivatives; fused where that can be."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.nn import functional as F

from apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    fused_add_layer_norm,
    fused_add_rms_norm,
)
from apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    FusedRMSNormAffineFunction,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)

EPS = 1e-6
C = 7  # columns


def rms_norm(x, weight=None):
    """Without F.rms_norm, which on GPUs has no forward mode through its gradient."""
    y = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return y if weight is None else y * weight


# Ours and torch's, of (x, weight, bias).
PAIRS = {
    "layer_norm_affine": (
        lambda x, w, b: fused_layer_norm_affine(x, w, b, C),
        lambda x, w, b: F.layer_norm(x, (C,), w, b, EPS),
    ),
    "layer_norm": (
        lambda x, w, b: fused_layer_norm(x, C),
        lambda x, w, b: F.layer_norm(x, (C,), eps=EPS),
    ),
    "layer_norm_mixed": (
        lambda x, w, b: mixed_dtype_fused_layer_norm_affine(x.float(), w, b, C),
        lambda x, w, b: F.layer_norm(x.float().double(), (C,), w, b, EPS),
    ),
    "rms_norm_affine": (
        lambda x, w, b: fused_rms_norm_affine(x, w, C),
        lambda x, w, b: rms_norm(x, w),
    ),
    "rms_norm": (
        lambda x, w, b: fused_rms_norm(x, C),
        lambda x, w, b: rms_norm(x),
    ),
    "rms_norm_mixed": (
        lambda x, w, b: mixed_dtype_fused_rms_norm_affine(x.float(), w, C),
        lambda x, w, b: rms_norm(x.float().double(), w),
    ),
    "add_layer_norm": (
        lambda x, w, b: fused_add_layer_norm(x, x.sin(), w, b),
        lambda x, w, b: F.layer_norm(x + x.sin(), (C,), w, b, EPS),
    ),
    "add_rms_norm": (
        lambda x, w, b: fused_add_rms_norm(x, x.sin(), w, prenorm=True)[0],
        lambda x, w, b: rms_norm(x + x.sin(), w),
    ),
}
TRANSFORMS = {
    "grad": lambda f, x, w, b: func.grad(lambda *a: f(*a).sin().sum(), argnums=(0, 1))(x, w, b),
    "vjp": lambda f, x, w, b: func.vjp(f, x, w, b)[1](x.cos())[0],
    "jvp": lambda f, x, w, b: func.jvp(f, (x, w, b), (x.cos(), w.cos(), b.cos())),
    "vmap": lambda f, x, w, b: func.vmap(f, (0, None, None))(x, w, b),
    "vmap weights": lambda f, x, w, b: func.vmap(f, (1, 0, 0))(
        x, w.expand(3, C).sin(), b.expand(3, C)
    ),
    "per-sample": lambda f, x, w, b: func.vmap(
        func.grad(lambda w, x: f(x, w, b).sin().sum()), (None, 0)
    )(w, x),
    "hessian": lambda f, x, w, b: func.hessian(lambda x: f(x, w, b).sin().sum())(x[0]),
}
# Those that torch's compiler takes, of torch's own norms too.
COMPILED = {
    name: TRANSFORMS[name] for name in ("grad", "vjp", "vmap", "vmap weights", "per-sample")
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("name", PAIRS)
def test_transforms(name, transform, device):
    x = torch.randn(2, 3, C, device=device, dtype=torch.float64)
    weight, bias = torch.randn(2, C, device=device, dtype=torch.float64)
    ours, theirs = (transform(f, x, weight, bias) for f in PAIRS[name])
    # The mixed forms' input is rounded to float32, and so is its gradient.
    tolerance = 1e-5 if "mixed" in name else 1e-10
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("transform", COMPILED.values(), ids=COMPILED.keys())
@pytest.mark.parametrize("name", PAIRS)
def test_compiled_transforms(name, transform, device):
    """Where the compiler sees gradients that a fused function would lose, in silence."""
    x = torch.randn(2, 3, C, device=device, dtype=torch.float64)
    weight, bias = torch.randn(2, C, device=device, dtype=torch.float64)
    ours, theirs = PAIRS[name]
    torch.compiler.reset()
    compiled = torch.compile(lambda *a: transform(ours, *a), backend="eager", fullgraph=True)
    tolerance = 1e-5 if "mixed" in name else 1e-10
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled):
            actual, expected = compiled(x, weight, bias), transform(theirs, x, weight, bias)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


CLASSES = {
    "layer": (
        lambda x, w: FusedLayerNormAffineFunction.apply(x, w, w, (C,), EPS),
        lambda x, w: F.layer_norm(x, (C,), w, w, EPS),
    ),
    "rms": (
        lambda x, w: FusedRMSNormAffineFunction.apply(x, w, (C,), EPS),
        lambda x, w: F.rms_norm(x, (C,), w, EPS),
    ),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("functions", CLASSES.values(), ids=CLASSES.keys())
def test_classes_are_transformed(functions, compiled, device):
    """Which torch gives gradients of zero in compiled code if they are autograd functions."""
    x, weight = torch.randn(3, C, device=device), torch.ones(C, device=device)
    ours, theirs = (func.grad(lambda x, f=f: (f(x, weight) ** 3).sum()) for f in functions)
    if compiled:
        torch.compiler.reset()
        ours = torch.compile(ours, backend="eager")
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm])
def test_compiled_gradients_per_sample(kind, device):
    """Of a model with trainable weights, and of what a compiled vmap returns."""
    model = torch.nn.Sequential(torch.nn.Linear(C, C), kind(C), torch.nn.Linear(C, 2)).to(device)
    x = torch.randn(3, C, device=device, requires_grad=True)

    def loss(parameters, row):
        return func.functional_call(model, parameters, (row,)).sin().sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    per_sample = func.vmap(func.grad(loss), (None, 0))
    torch.compiler.reset()
    torch.testing.assert_close(
        torch.compile(per_sample, backend="eager")(parameters, x), per_sample(parameters, x)
    )
    y = torch.compile(func.vmap(model), backend="eager")(x)
    gradients = [torch.autograd.grad(o.sin().sum(), x)[0] for o in (y, model(x))]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_nothing_is_kept_where_nothing_requires_a_gradient(kind, device):
    x, weight = torch.randn(3, C, device=device), torch.randn(C, device=device)
    y = PAIRS[f"{kind}_norm_affine"][0](x, weight, None)
    assert y.grad_fn is None
    assert PAIRS[f"{kind}_norm_affine"][0](x, weight.requires_grad_(), None).grad_fn is not None


@pytest.mark.parametrize("name", PAIRS)
def test_forward_mode_without_gradients(name, device):
    """Where the kernels, which have no formula for it, would give tangents of zero in silence."""
    x, weight, bias = torch.randn(3, C, device=device, dtype=torch.float64)
    tolerance = 1e-5 if "mixed" in name else 1e-10
    for mode, transform in (
        (torch.no_grad, TRANSFORMS["jvp"]),
        (torch.no_grad, lambda f, x, w, b: func.jacfwd(f)(x, w, b)),
        (torch.inference_mode, TRANSFORMS["jvp"]),  # in torch 2.10 zeros, of whatever function
    ):
        with mode():
            ours, theirs = (transform(f, x, weight, bias) for f in PAIRS[name])
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("grad_enabled", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_dual_level(name, grad_enabled, device):
    x, weight, bias = torch.randn(3, C, device=device, dtype=torch.float64)
    with torch.set_grad_enabled(grad_enabled), forward_ad.dual_level():
        dual = forward_ad.make_dual(x[None], x[None].cos())
        tangents = [forward_ad.unpack_dual(f(dual, weight, bias)).tangent for f in PAIRS[name]]
    tolerance = 1e-5 if "mixed" in name else 1e-10
    torch.testing.assert_close(*tangents, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PAIRS)
def test_vmap_without_gradients_is_fused(name, device):
    """A batch of rows is more rows for the kernel: the same bits, and no warning of a fallback."""
    x = torch.randn(3, 5, 4, C, device=device)
    weight, bias = torch.randn(2, C, device=device)
    norm = PAIRS[name][0]
    weight = weight.double() if "mixed" in name else weight
    bias = bias.to(weight.dtype)
    with torch.no_grad():
        expected = torch.stack([norm(x[:, i], weight, bias) for i in range(5)], dim=1)
        actual = func.vmap(norm, (1, None, None), out_dims=1)(x, weight, bias)
        assert torch.equal(actual, expected)
        weights = torch.stack([weight, bias])
        each = func.vmap(norm, (None, 0, None))(x, weights, bias)
        for i in range(2):
            assert torch.equal(each[i], norm(x, weights[i], bias))


@pytest.mark.parametrize(
    ("name", "prenorm"),
    [*((name, False) for name in PAIRS), ("add_layer_norm", True), ("add_rms_norm", True)],
)
def test_gradients_that_can_be_differentiated_are_the_same(name, prenorm, device):
    """``create_graph=True`` takes formulas in place of kernels; gradgradcheck sees them alone."""
    inputs = [torch.randn(s, device=device, requires_grad=True) for s in ((3, C), (C,), (C,))]
    norm = PAIRS[name][0]
    if prenorm and "layer" in name:
        norm = lambda x, w, b: sum(fused_add_layer_norm(x, x.sin(), w, b, prenorm=True))
    elif prenorm:
        norm = lambda x, w, b: sum(fused_add_rms_norm(x, x.sin(), w, prenorm=True))
    dy = torch.randn(3, C, device=device)
    options = {"allow_unused": True, "retain_graph": True}
    y = norm(*inputs)
    expected = torch.autograd.grad(y, inputs, dy, **options)
    actual = torch.autograd.grad(y, inputs, dy, create_graph=True, **options)
    assert actual[0].requires_grad
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_batched_gradients(kind, device):
    """``is_grads_batched``, as vectorized Jacobians use it, runs the backward kernel."""
    x, weight = (torch.randn(s, device=device, requires_grad=True) for s in ((3, C), (C,)))
    y = PAIRS[f"{kind}_norm_affine"][0](x, weight, None)
    dys = torch.randn(4, 3, C, device=device)
    batched = torch.autograd.grad(y, (x, weight), dys, is_grads_batched=True, retain_graph=True)
    for i, dy in enumerate(dys):
        expected = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
        for a, e in zip(batched, expected, strict=True):
            torch.testing.assert_close(a[i], e)


@pytest.mark.parametrize("name", PAIRS)
def test_forward_mode_through_the_gradient(name, device):
    """Without ``create_graph``, where the kernels would drop the tangent of their gradient."""
    x, weight, bias, dy = torch.randn(4, 3, C, device=device, dtype=torch.float64)
    weight, bias = weight[0], bias[0]
    inputs = [t.requires_grad_() for t in (x, weight)]

    def tangents(norm):
        y = norm(x, weight, bias)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(dy.to(y.dtype), dy.cos().to(y.dtype))
            grads = torch.autograd.grad(y, inputs, dual, allow_unused=True)
            return [g if g is None else forward_ad.unpack_dual(g).tangent for g in grads]

    tolerance = 1e-5 if "mixed" in name else 1e-10
    ours, theirs = (tangents(f) for f in PAIRS[name])
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_memory_efficient_gradients_refuse_forward_mode(device):
    x, dy = torch.randn(2, 3, C, device=device)
    y = fused_layer_norm(x.requires_grad_(), C, memory_efficient=True)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.autograd.grad(y, x, forward_ad.make_dual(dy, dy))
