"""Zero-centred weights: norms that multiply by 1 + weight, as Gemma's and LayerNorm1P do."""

import copy
import pickle

import pytest
import torch

from apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_add_layer_norm,
    fused_add_rms_norm,
)
from apex.normalization.fused_add_norm import ops as add_ops
from apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    fused_layer_norm_affine,
    fused_rms_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
    ops,
)
from apex_testkit import FLOATS, HALVES, assert_as_accurate_as, opcheck_samples
from apex_testkit.norms import GemmaRMSNorm, LayerNorm1P

EPS = 1e-5
MODULES = [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm]
LAYER, RMS = FusedLayerNormAffineFunction.apply, FusedRMSNormAffineFunction.apply
CENTERED = {"zero_centered_gamma": True}

# Norms of x, weight, bias and options. Small layer norms on the CPU are torch's kernel, but those
# of the classes of Apex's name are ours.
NORMS = {
    "layer": lambda x, w, b, **o: fused_layer_norm_affine(x, w, b, w.shape, EPS, **o),
    "layer, ours": lambda x, w, b, **o: LAYER(x, w, b, w.shape, EPS, **o),
    "rms": lambda x, w, b, **o: fused_rms_norm_affine(x, w, w.shape, EPS, **o),
    "add layer": lambda x, w, b, **o: fused_add_layer_norm(x, 0 * x, w, b, EPS, **o),
    "add rms": lambda x, w, b, **o: fused_add_rms_norm(x, 0 * x, w, EPS, **o),
}
FROM_OUTPUT = {
    "layer": lambda x, w, b, **o: LAYER(x, w, b, w.shape, EPS, True, **o),
    "rms": lambda x, w, b, **o: RMS(x, w, w.shape, EPS, True, **o),
}
MIXED = {
    "layer": lambda x, w, b, **o: mixed_dtype_fused_layer_norm_affine(x, w, b, w.shape, EPS, **o),
    "layer, ours": lambda x, w, b, **o: FusedLayerNormAffineMixedDtypesFunction.apply(
        x, w, b, w.shape, EPS, **o
    ),
    "rms": lambda x, w, b, **o: mixed_dtype_fused_rms_norm_affine(x, w, w.shape, EPS, **o),
    "rms, class": lambda x, w, b, **o: FusedRMSNormAffineMixedDtypesFunction.apply(
        x, w, w.shape, EPS, **o
    ),
}
SHAPES = {"empty": (0, 5), "odd": (7, 33), "tail": (3, 1027), "one row": (1, 257)}


def formula(name, x, weight, bias):
    """What the norms of a name are, in the words of their definition."""
    if "layer" in name:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + weight)
    return y + bias if "layer" in name else y


def operands(shape, dtype, device, weight_dtype=None):
    """Rows, weight, bias and output gradient."""
    weight_dtype = weight_dtype or dtype
    x = torch.randn(shape, device=device, dtype=dtype)
    weight, bias = torch.randn(2, shape[-1], device=device, dtype=weight_dtype)
    return x, weight / 4, bias, torch.randn(shape, device=device, dtype=weight_dtype)


def outputs_and_grads(norm, x, weight, bias, dy):
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = norm(*inputs)
    grads = torch.autograd.grad(y, inputs, dy, allow_unused=True)
    return y.detach(), *(g for g in grads if g is not None)


def check(name, norm, *arguments):
    actual = outputs_and_grads(lambda *a: norm(*a, **CENTERED), *arguments)
    x, weight, *_ = arguments
    count = 4 if "layer" in name else 3
    assert [t.dtype for t in actual] == [weight.dtype, x.dtype, weight.dtype, weight.dtype][:count]
    reference = lambda *a: outputs_and_grads(lambda *b: formula(name, *b), *a)
    # Truth errs as much as we do in float64.
    ulps = 3.0 if torch.float64 in (x.dtype, weight.dtype) else 1.0
    assert_as_accurate_as(reference, actual, *arguments, ulps=ulps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", NORMS)
def test_accuracy(name, shape, dtype, device):
    check(name, NORMS[name], *operands(shape, dtype, device))


PAIRS = [(h, torch.float32) for h in HALVES] + [(torch.float32, h) for h in HALVES]


@pytest.mark.parametrize(
    "dtypes", [*PAIRS, (torch.half, torch.bfloat16), (torch.half, torch.float64)], ids=str
)
@pytest.mark.parametrize("name", MIXED)
def test_mixed_dtypes(name, dtypes, device):
    check(name, MIXED[name], *operands((5, 129), dtypes[0], device, dtypes[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(7, 33), (3, 1027)], ids=str)
@pytest.mark.parametrize("name", [*NORMS, *(f"{name}, from output" for name in FROM_OUTPUT)])
def test_same_bits_as_the_sum(name, shape, dtype, device):
    """As a plain norm of 1 + weight, where that sum is rounded as in the kernels."""
    kind = name.removesuffix(", from output")
    norm = NORMS[name] if name in NORMS else FROM_OUTPUT[kind]
    x, weight, bias, dy = operands(shape, dtype, device)
    weight[0] = -2  # a factor of -1
    actual = outputs_and_grads(lambda *a: norm(*a, **CENTERED), x, weight, bias, dy)
    expected = outputs_and_grads(norm, x, 1 + weight, bias, dy)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", FROM_OUTPUT)
def test_recovered_from_16_bits(kind, dtype, device):
    """Gradients are those of an xhat recovered from the rounded output."""
    x, weight, bias, dy = operands((5, 257), dtype, device)
    norm = lambda *a: FROM_OUTPUT[kind](*a, **CENTERED)
    y, *grads = outputs_and_grads(norm, x, weight, bias, dy)
    assert torch.equal(
        y, NORMS[f"{kind}, ours" if kind == "layer" else kind](x, weight, bias, **CENTERED)
    )

    def gradients(y, x, weight, bias, dy):
        is_layer = kind == "layer"
        scale, center = 1 + weight, x.mean(-1, keepdim=True) if is_layer else 0
        xhat = (y - bias if is_layer else y) / scale
        rstd = torch.rsqrt((x - center).square().mean(-1, keepdim=True) + EPS)
        g = dy * scale
        mean_g = g.mean(-1, keepdim=True) if is_layer else 0
        dx = rstd * (g - mean_g - xhat * (g * xhat).mean(-1, keepdim=True))
        return dx, (dy * xhat).sum(0), *([dy.sum(0)] if is_layer else [])

    assert_as_accurate_as(gradients, grads, y, x, weight, bias, dy)


def results_of(x, weight, bias):
    """Of every entrance: whether it is a layer norm, and what it returns."""
    for name, norm in (*NORMS.items(), *FROM_OUTPUT.items(), *MIXED.items()):
        yield "layer" in name, norm(x, weight, bias, **CENTERED)
    for kind in MODULES:
        module = kind(weight.shape, **CENTERED).to(weight)
        module.weight.data.copy_(weight)
        yield "Layer" in kind.__name__, module(x)
        module.float()
        with torch.autocast(x.device.type, x.dtype):
            yield "Layer" in kind.__name__, module(x.float())


@pytest.mark.parametrize("grad_enabled", [True, False])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_small_weights_of_16_bits_count(dtype, grad_enabled, device):
    """In 16 bits 1 + weight would be 1, and one number in ten another than all entrances give."""
    small = 2.0 ** (-10 if dtype == torch.bfloat16 else -12)
    weight = torch.full((4096,), small, device=device, dtype=dtype, requires_grad=True)
    assert (1 + weight).eq(1).all()
    for rows in (1, 2, 20):  # where torch's kernel computes in 16 bits, in float32, and not
        x = torch.randn(rows, 4096, device=device).to(dtype)
        wide = x.double()
        deviation = wide - wide.mean(-1, keepdim=True)
        with torch.set_grad_enabled(grad_enabled):
            results = list(results_of(x, weight, torch.zeros_like(weight)))
        assert len(results) == 19
        for is_layer, y in results:
            assert y.dtype == dtype
            assert y.requires_grad == grad_enabled
            xhat = torch.nn.functional.rms_norm(deviation if is_layer else wide, (4096,), eps=EPS)
            truth = (xhat * (1 + small)).to(dtype)
            # Near a tie, float32 may round the other way.
            assert (y != truth).double().mean() < 0.01
            assert (xhat.to(dtype) != truth).double().mean() > 0.1


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("theirs", [GemmaRMSNorm, LayerNorm1P])
def test_modules_of_16_bit_models(theirs, dtype, device):
    """Against the formula in float64, and against the module of a library."""
    name, kind = ("rms", FusedRMSNorm) if theirs is GemmaRMSNorm else ("layer", FusedLayerNorm)
    x, weight, bias, dy = operands((18, 96), dtype, device)
    ours = kind(96, EPS, device=device, dtype=dtype, **CENTERED)

    def norm(x, *parameters, **_):
        given = dict(zip(ours.state_dict(), parameters, strict=False))
        return torch.func.functional_call(ours, given, (x,))

    check(name, norm, x, weight, bias, dy)
    module = theirs(96, EPS).to(device, dtype)
    torch.nn.init.normal_(module.weight)
    ours.load_state_dict(module.state_dict())
    unit = 2 * torch.finfo(dtype).eps  # LayerNorm1P rounds 1 + weight, too
    torch.testing.assert_close(ours(x), module(x), rtol=unit, atol=unit)


@pytest.mark.parametrize("kind", MODULES)
def test_modules(kind, device):
    module = kind(5, **CENTERED).to(device)
    assert torch.equal(module.weight, torch.zeros(5, device=device))
    assert list(module.state_dict()) == list(kind(5).state_dict())
    shown = "((5,), eps=1e-05, elementwise_affine=True, zero_centered_gamma=True)"
    assert repr(module) == f"{kind.__name__}{shown}"
    x = torch.randn(3, 5, device=device)
    torch.testing.assert_close(module(x), kind(5).to(device)(x))
    torch.nn.init.normal_(module.weight)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
    module.reset_parameters()
    assert module.weight.eq(0).all()


def test_modules_without_weight_and_of_old_pickles(device):
    x = torch.randn(3, 5, device=device)
    for kind in (FusedLayerNorm, FusedRMSNorm):
        plain = kind(5, elementwise_affine=False)
        assert torch.equal(kind(5, elementwise_affine=False, **CENTERED)(x), plain(x))
        module = kind(5).to(device)
        del module.__dict__["zero_centered_gamma"]  # as a pickle of Apex's has none
        assert "zero" not in repr(module)
        assert torch.equal(module(x), kind(5).to(device)(x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_conversion_keeps_the_function(dtype, device):
    """Weights from 0.5 to 2 lose no digit: their difference from 1 is a number of their dtype."""
    plain = FusedRMSNorm(64, device=device, dtype=dtype)
    with torch.no_grad():
        plain.weight.uniform_(0.5, 2)
    centered = FusedRMSNorm(64, device=device, dtype=dtype, **CENTERED)
    centered.load_state_dict({k: v - 1 for k, v in plain.state_dict().items()})
    x = torch.randn(5, 64, device=device, dtype=dtype)
    assert torch.equal(centered(x), plain(x))
    plain.load_state_dict({k: v + 1 for k, v in centered.state_dict().items()})
    assert torch.equal(centered(x), plain(x))


@pytest.mark.parametrize("name", FROM_OUTPUT)
def test_what_erases_the_input_is_refused(name, device):
    x, weight, bias, dy = operands((9, 65), torch.float32, device)
    weight[3], weight[4] = -1, 0
    norm = FROM_OUTPUT[name]
    y = norm(x, weight, bias, **CENTERED)  # no gradient wanted
    if device.type == "cpu":
        text = r"weight\[3\] is -1 \(1 of 65 are\), .* start from weights other than -1"
        with pytest.raises(ValueError, match=text):
            norm(x.requires_grad_(), weight, bias, **CENTERED)
    tail = (65, EPS, True, True)
    if name == "layer":
        rstd = ops.layer_norm_forward(x.detach(), weight, bias, 65, EPS, True)[2]
        grads = ops.layer_norm_backward_from_output(dy, y, weight, bias, rstd, *tail)
    else:
        rstd = ops.rms_norm_forward(x.detach(), weight, 65, EPS, True)[1]
        grads = ops.rms_norm_backward_from_output(dy, y, weight, rstd, *tail)
    assert all(g.isfinite().all() for g in grads)
    weight[3] = 1
    leaf = weight.requires_grad_()
    norm(x.detach(), leaf, bias, **CENTERED).backward(dy)
    assert leaf.grad[4] != 0


def test_opcheck(device):
    """Also by keyword; calls without the argument are those of the other tests."""
    x, weight, bias, dy = operands((4, 33), torch.float32, device)
    C = 33
    y, mean, rstd = ops.layer_norm_forward(x, weight, bias, C, EPS, zero_centered_gamma=True)
    by_position = ops.layer_norm_forward(x, weight, bias, C, EPS, True)
    assert torch.equal(y, by_position[0])
    samples = {
        ops.layer_norm_forward: (x, weight, bias, C, EPS, True),
        ops.layer_norm_backward: (dy, x, weight, mean, rstd, C, True, True),
        ops.layer_norm_backward_from_output: (dy, y, weight, bias, rstd, C, EPS, True, True),
        ops.rms_norm_forward: (x, weight, C, EPS, True),
        ops.rms_norm_backward: (dy, x, weight, rstd, C, True, True),
        ops.rms_norm_backward_from_output: (dy, y, weight, rstd, C, EPS, True, True),
        add_ops.add_layer_norm_forward: (x, dy, weight, bias, C, EPS, True),
        add_ops.add_layer_norm_backward: (dy, None, x, weight, mean, rstd, C, True, True),
        add_ops.add_rms_norm_forward: (x, dy, weight, C, EPS, True),
        add_ops.add_rms_norm_backward: (dy, None, x, weight, rstd, C, True, True),
    }
    for op, arguments in samples.items():
        opcheck_samples(op, [arguments])
    without = ops.layer_norm_forward(x, None, None, C, EPS, True)[0]  # nothing to be centred
    assert torch.equal(without, ops.layer_norm_forward(x, None, None, C, EPS)[0])
