"""RMS normalization against float64, over dtypes, shapes, layouts and options."""

import pytest
import torch

from apex.normalization.fused_layer_norm import (
    FusedRMSNormAffineFunction,
    FusedRMSNormFunction,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_rms_norm_affine,
)
from apex_testkit import FLOATS, LAYOUTS, SHAPES, assert_as_accurate_as
from apex_testkit.devices import runs_gpu_kernels

EPS = 1e-5
# In a single column nearly everything cancels; test_one_column is about that.
NORM_SHAPES = {**SHAPES, "one": (1, 33)}
PAIRS = [(x, w) for x in FLOATS for w in FLOATS if x != w]


def operands(shape, dtype, device, weight_dtype=None):
    """Input, weight and output gradient of a matrix, the latter two in the weight's dtype."""
    weight_dtype = weight_dtype or dtype
    x = torch.randn(shape, device=device, dtype=dtype)
    weight = torch.randn(shape[-1], device=device, dtype=weight_dtype)
    return x, weight, torch.randn(shape, device=device, dtype=weight_dtype)


def outputs_and_grads(norm, x, weight, dy):
    """Return y, dx and dweight."""
    inputs = [t.detach().requires_grad_() for t in (x, weight)]
    y = norm(*inputs)
    return y, *torch.autograd.grad(y, inputs, dy)


def formula(x, weight=None):
    """RMS normalization as its definition says."""
    xhat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return xhat if weight is None else xhat * weight


def check(actual, *arguments):
    """Check y and dx to one rounding, sums over rows to as many as they are stored."""
    rows = arguments[0].shape[0]
    assert_as_accurate_as(lambda *args: reference(*args)[:2], actual[:2], *arguments)
    assert_as_accurate_as(
        lambda *args: reference(*args)[2], actual[2], *arguments, ulps=stores(rows, actual[2])
    )


def stores(rows, sums):
    """Roundings of a column's sum: float64 totals are stored every 32 rows, a random walk."""
    return max(1.0, (rows / 32) ** 0.5) if sums.dtype == torch.float64 else 1.0


def apex_norm(x, weight):
    return fused_rms_norm_affine(x, weight, x.shape[-1:], EPS)


def reference(x, weight, dy):
    return outputs_and_grads(formula, x, weight, dy)


def gradients_from_output(y, x, weight, dy):
    """Return dx and dweight with xhat recovered from the (rounded) output."""
    xhat = y / weight
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    g = dy * weight
    return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True)), (dy * xhat).sum(0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES.values(), ids=NORM_SHAPES.keys())
def test_affine(shape, dtype, device):
    arguments = operands(shape, dtype, device)
    actual = outputs_and_grads(apex_norm, *arguments)
    assert [t.dtype for t in actual] == [dtype] * 3
    check(actual, *arguments)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES.values(), ids=NORM_SHAPES.keys())
def test_not_affine(shape, dtype, device):
    x, _, dy = operands(shape, dtype, device)
    x.requires_grad_()
    y = fused_rms_norm(x, shape[-1:], EPS)
    assert_as_accurate_as(formula, y, x)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_as_accurate_as(lambda x, dy: torch.autograd.grad(formula(x), x, dy)[0], dx, x, dy)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_column(dtype, device):
    """The output is the input's sign; its gradient is eps and the rounding of g, times rstd."""
    x, weight, dy = operands((7, 1), dtype, device)
    y, dx, dweight = outputs_and_grads(apex_norm, x, weight, dy)
    assert_as_accurate_as(formula, y, x, weight)
    assert_as_accurate_as(lambda *args: reference(*args)[2], dweight, x, weight, dy)
    truth = reference(x.double(), weight.double(), dy.double())[1]
    unit = 2.0**-52 if dtype == torch.float64 else 2.0**-23  # of what is computed in
    bound = 4 * unit * (dy * weight / x).abs().double() + truth.abs() * torch.finfo(dtype).eps
    bound += torch.finfo(dtype).smallest_normal  # float16 has subnormals here
    assert ((dx - truth).abs() <= bound).all()


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_mixed_dtypes(dtypes, device):
    dtype, weight_dtype = dtypes
    norm = lambda x, w: mixed_dtype_fused_rms_norm_affine(x, w, x.shape[-1:], EPS)
    arguments = operands((33, 257), dtype, device, weight_dtype)
    actual = outputs_and_grads(norm, *arguments)
    assert [t.dtype for t in actual] == [weight_dtype, dtype, weight_dtype]
    check(actual, *arguments)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES.values(), ids=NORM_SHAPES.keys())
def test_memory_efficient(shape, dtype, device):
    """The output is the same; gradients are those of an xhat recovered from the rounded output."""
    x, weight, dy = operands(shape, dtype, device)
    weight = torch.copysign(weight.abs() + 0.5, weight)
    norm = lambda x, w: fused_rms_norm_affine(x, w, x.shape[-1:], EPS, True)
    y, *grads = outputs_and_grads(norm, x, weight, dy)
    assert torch.equal(y, apex_norm(x, weight))
    arguments = y.detach(), x, weight, dy
    assert_as_accurate_as(lambda *args: gradients_from_output(*args)[0], grads[0], *arguments)
    assert_as_accurate_as(
        lambda *args: gradients_from_output(*args)[1],
        grads[1],
        *arguments,
        ulps=stores(shape[0], grads[1]),
    )


@pytest.mark.parametrize("weight_value", [0.0, 1e-9, -1e-9])
def test_tiny_weights(weight_value, device):
    """Exact without memory_efficient; with it, finite, and refused where a weight is zero."""
    x, weight, dy = operands((9, 65), torch.float32, device)
    weight[::2] = weight_value
    arguments = x, weight, dy
    check(outputs_and_grads(apex_norm, *arguments), *arguments)
    efficient = lambda x, w: fused_rms_norm_affine(x, w, x.shape[-1:], EPS, True)
    if weight_value == 0 and device.type == "cpu":
        with pytest.raises(ValueError, match=r"weight\[0\] is 0 \(33 of 65 are\)"):
            outputs_and_grads(efficient, *arguments)
        return
    _, dx, dweight = outputs_and_grads(efficient, *arguments)
    assert dx.isfinite().all()
    assert dweight.isfinite().all()
    assert weight_value != 0 or (dweight[::2] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout, device):
    x, weight, dy = operands((6, 67), torch.float16, device)
    expected = outputs_and_grads(apex_norm, x, weight, dy)
    actual = outputs_and_grads(apex_norm, layout(x), layout(weight), layout(dy))
    check(actual, x, weight, dy)
    for e, a in zip(expected, actual, strict=True):
        # On a GPU threads take other columns where rows do not begin at 16 bytes.
        assert torch.equal(e, a) or runs_gpu_kernels(device)


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_gradcheck(memory_efficient, device):
    x, weight, _ = operands((3, 7), torch.float64, device)
    weight = torch.copysign(weight.abs() + 0.5, weight).requires_grad_()
    x.requires_grad_()
    affine = lambda *args: FusedRMSNormAffineFunction.apply(*args, 7, EPS, memory_efficient)
    assert torch.autograd.gradcheck(affine, (x, weight))
    plain = lambda x: FusedRMSNormFunction.apply(x, (7,), EPS, memory_efficient)
    assert torch.autograd.gradcheck(plain, (x,))


def test_frozen_weight(device):
    x, weight, dy = operands((5, 33), torch.float32, device)
    _, expected, _ = outputs_and_grads(apex_norm, x, weight, dy)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(apex_norm(x, weight), x, dy)
    assert torch.equal(dx, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, *FLOATS], ids=str)
def test_manual_rms_norm(dtype, weight_dtype, device):
    x, weight, _ = operands((5, 33), dtype, device, weight_dtype)
    weight = None if weight_dtype is None else weight
    y = manual_rms_norm(x, (33,), weight, EPS)
    assert y.dtype == (weight_dtype or dtype)
    # Rounded to the weight's dtype before and after the multiplication.
    assert_as_accurate_as(formula, y, x, weight, ulps=2)


def test_second_derivative(device):
    x, weight, _ = operands((3, 5), torch.float64, device)
    inputs = [t.requires_grad_() for t in (x, weight)]
    assert torch.autograd.gradgradcheck(apex_norm, inputs)
    assert torch.autograd.gradgradcheck(lambda x: fused_rms_norm(x, 5, EPS), inputs[:1])


def test_second_derivative_of_memory_efficient_is_refused(device):
    x, weight, _ = operands((2, 8), torch.float32, device)
    affine = fused_rms_norm_affine(x.requires_grad_(), weight, 8, EPS, True)
    for y in (affine, fused_rms_norm(x, 8, EPS, True)):
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            dx.square().sum().backward()
