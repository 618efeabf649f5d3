"""Layer normalization against float64, over dtypes, shapes, layouts and options."""

import pytest
import torch
import torch.nn.functional as F

from apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    FusedLayerNormFunction,
    fused_layer_norm,
    fused_layer_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    ops,
)
from apex_testkit import FLOATS, LAYOUTS, SHAPES, assert_as_accurate_as
from apex_testkit.devices import runs_gpu_kernels

EPS = 1e-5
# A single column has no variance; test_one_column is about that.
# More rows than a GPU has threads for: blocks that add up columns stay for several.
NORM_SHAPES = {**SHAPES, "one": (1, 33), "many": (4160, 8)}
PAIRS = [(x, w) for x in FLOATS for w in FLOATS if x != w]


def operands(shape, dtype, device, weight_dtype=None):
    """Input, weight, bias and output gradient of a matrix; all but the input in weight_dtype."""
    weight_dtype = weight_dtype or dtype
    x = torch.randn(shape, device=device, dtype=dtype)
    weight, bias = torch.randn(2, shape[-1], device=device, dtype=weight_dtype)
    dy = torch.randn(shape, device=device, dtype=weight_dtype)
    return x, weight, bias, dy


def outputs_and_grads(norm, x, weight, bias, dy):
    """Return y, dx, dweight and dbias."""
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = norm(*inputs)
    return y, *torch.autograd.grad(y, inputs, dy)


def formula(x, weight=None, bias=None):
    """Layer normalization as its definition says; F.layer_norm sums its gradients less exactly."""
    deviation = x - x.mean(-1, keepdim=True)
    xhat = deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + EPS)
    y = xhat if weight is None else xhat * weight
    return y if bias is None else y + bias


def check(actual, *arguments):
    """Check y and dx to one rounding, sums over rows to as many as they are stored."""
    rows = arguments[0].shape[0]
    assert_as_accurate_as(lambda *args: reference(*args)[:2], actual[:2], *arguments)
    assert_as_accurate_as(
        lambda *args: reference(*args)[2:], actual[2:], *arguments, ulps=stores(rows, actual[2])
    )


def stores(rows, sums):
    """Roundings of a column's sum: float64 totals are stored every 32 rows, a random walk."""
    return max(1.0, (rows / 32) ** 0.5) if sums.dtype == torch.float64 else 1.0


def apex_norm(x, weight, bias):
    return fused_layer_norm_affine(x, weight, bias, x.shape[-1:], EPS)


def reference(x, weight, bias, dy):
    return outputs_and_grads(formula, x, weight, bias, dy)


def gradients_from_output(y, x, weight, bias, dy):
    """Return dx, dweight and dbias with xhat recovered from the (rounded) output."""
    smallest = torch.where(weight < 0, -EPS, EPS).to(weight.dtype)
    xhat = (y - bias) / torch.where(weight.abs() < EPS, smallest, weight)
    rstd = torch.rsqrt((x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + EPS)
    g = dy * weight
    mean_g, mean_g_xhat = g.mean(-1, keepdim=True), (g * xhat).mean(-1, keepdim=True)
    return rstd * (g - mean_g - xhat * mean_g_xhat), (dy * xhat).sum(0), dy.sum(0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES.values(), ids=NORM_SHAPES.keys())
def test_affine(shape, dtype, device):
    arguments = operands(shape, dtype, device)
    actual = outputs_and_grads(apex_norm, *arguments)
    assert [t.dtype for t in actual] == [dtype] * 4
    check(actual, *arguments)


def test_packs_of_rows_that_a_gpu_does_not_keep(device):
    arguments = operands((5, 34), torch.float64, device)
    check(outputs_and_grads(apex_norm, *arguments), *arguments)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES.values(), ids=NORM_SHAPES.keys())
def test_not_affine(shape, dtype, device):
    x, _, _, dy = operands(shape, dtype, device)
    x.requires_grad_()
    y = fused_layer_norm(x, shape[-1:], EPS)
    assert_as_accurate_as(formula, y, x)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_as_accurate_as(lambda x, dy: torch.autograd.grad(formula(x), x, dy)[0], dx, x, dy)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES.values(), ids=NORM_SHAPES.keys())
def test_weight_without_bias(shape, dtype, device):
    x, weight, _, dy = operands(shape, dtype, device)

    def grads(norm, x, weight, dy):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = norm(x, weight, None)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    actual = grads(apex_norm, x, weight, dy)
    assert_as_accurate_as(lambda *args: grads(formula, *args)[:2], actual[:2], x, weight, dy)
    ulps = stores(shape[0], actual[2])
    assert_as_accurate_as(
        lambda *args: grads(formula, *args)[2], actual[2], x, weight, dy, ulps=ulps
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_column(dtype, device):
    """Without deviations only the bias is left, and no gradient but rounding, times rstd."""
    x, weight, bias, dy = operands((7, 1), dtype, device)
    y, dx, dweight, dbias = outputs_and_grads(apex_norm, x, weight, bias, dy)
    assert torch.equal(y, bias.expand(7, 1))
    unit = 2.0**-52 if dtype == torch.float64 else 2.0**-23  # of what is computed in
    assert dx.abs().max() <= (dy * weight).abs().max() * unit * EPS**-0.5
    assert dweight == 0
    assert_as_accurate_as(lambda dy: dy.sum(0), dbias, dy)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_mixed_dtypes(dtypes, device):
    dtype, weight_dtype = dtypes
    norm = lambda x, w, b: mixed_dtype_fused_layer_norm_affine(x, w, b, x.shape[-1:], EPS)
    arguments = operands((33, 257), dtype, device, weight_dtype)
    actual = outputs_and_grads(norm, *arguments)
    assert [t.dtype for t in actual] == [weight_dtype, dtype, weight_dtype, weight_dtype]
    check(actual, *arguments)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES.values(), ids=NORM_SHAPES.keys())
def test_memory_efficient(shape, dtype, device):
    """The output is the same; gradients are those of an xhat recovered from the rounded output."""
    x, weight, bias, dy = operands(shape, dtype, device)
    weight = torch.copysign(weight.abs() + 0.5, weight)
    norm = lambda x, w, b: fused_layer_norm_affine(x, w, b, x.shape[-1:], EPS, True)
    y, *grads = outputs_and_grads(norm, x, weight, bias, dy)
    assert torch.equal(y, apex_norm(x, weight, bias))
    arguments = y.detach(), x, weight, bias, dy
    assert_as_accurate_as(lambda *args: gradients_from_output(*args)[0], grads[0], *arguments)
    assert_as_accurate_as(
        lambda *args: gradients_from_output(*args)[1:],
        grads[1:],
        *arguments,
        ulps=stores(shape[0], grads[1]),
    )


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.half)])
def test_memory_efficient_mixed(dtypes, device):
    x, weight, bias, dy = operands((17, 129), dtypes[0], device, dtypes[1])
    weight = torch.copysign(weight.abs() + 0.5, weight)
    norm = lambda x, w, b: mixed_dtype_fused_layer_norm_affine(x, w, b, x.shape[-1:], EPS, True)
    y, *grads = outputs_and_grads(norm, x, weight, bias, dy)
    assert [t.dtype for t in (y, *grads)] == [dtypes[1], dtypes[0], dtypes[1], dtypes[1]]
    # What is kept is the output as the kernel wrote it: before it is rounded to a narrower weight.
    with torch.no_grad():
        y = norm(x, weight.float(), bias.float())
    assert_as_accurate_as(gradients_from_output, grads, y, x, weight, bias, dy)


@pytest.mark.parametrize("weight_value", [0.0, 1e-9, -1e-9])
def test_tiny_weights_do_not_spoil_the_input_gradient(weight_value, device):
    """The clamp that keeps memory_efficient finite must not leak into the ordinary backward."""
    x, weight, bias, dy = operands((9, 65), torch.float32, device)
    weight[::2] = weight_value
    arguments = x, weight, bias, dy
    check(outputs_and_grads(apex_norm, *arguments), *arguments)


def test_memory_efficient_with_zero_weight_is_refused(device):
    """Nothing is left of that column's input; where that cannot be seen in time, it is finite."""
    x, weight, bias, dy = operands((9, 65), torch.float32, device)
    weight[3] = 0.0
    norm = lambda x, w, b: fused_layer_norm_affine(x, w, b, x.shape[-1:], EPS, True)
    assert torch.equal(norm(x, weight, bias), apex_norm(x, weight, bias))  # no gradient wanted
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"weight\[3\] is 0 \(1 of 65 are\)"):
            norm(x.requires_grad_(), weight, bias)
    y, _, rstd = ops.layer_norm_forward(x.detach(), weight, bias, 65, EPS)
    dx, dweight, dbias = ops.layer_norm_backward_from_output(
        dy, y, weight, bias, rstd, 65, EPS, True
    )
    assert dx.isfinite().all()
    assert dweight[3] == 0
    assert_as_accurate_as(lambda dy: dy.sum(0), dbias, dy)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(layout, dtype, device):
    x, weight, bias, dy = operands((6, 67), dtype, device)
    expected = outputs_and_grads(apex_norm, x, weight, bias, dy)
    actual = outputs_and_grads(apex_norm, layout(x), layout(weight), layout(bias), layout(dy))
    check(actual, x, weight, bias, dy)
    for e, a in zip(expected, actual, strict=True):
        # On a GPU threads take other columns where rows do not begin at 16 bytes.
        assert torch.equal(e, a) or runs_gpu_kernels(device)


def test_several_normalized_dimensions(device):
    x = torch.randn(2, 3, 4, 5, device=device)
    weight, bias = torch.randn(2, 4, 5, device=device)
    arguments = x, weight, bias, torch.randn_like(x)

    def grads(norm):
        return lambda *args: outputs_and_grads(norm, *args)

    torch_nd = lambda x, w, b: F.layer_norm(x, (4, 5), w, b, EPS)
    apex_nd = lambda x, w, b: fused_layer_norm_affine(x, w, b, (4, 5), EPS)
    actual = grads(apex_nd)(*arguments)
    assert [t.shape for t in actual] == [x.shape, x.shape, (4, 5), (4, 5)]
    assert_as_accurate_as(grads(torch_nd), actual, *arguments)


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_offset_does_not_cancel(offset, device):
    """Two-pass variance: rows far from zero keep their accuracy (E[x^2]-E[x]^2 would not)."""
    x = torch.randn(4, 512, device=device) + offset
    assert_as_accurate_as(formula, fused_layer_norm(x, 512, EPS), x)


def test_inf_and_nan_stay_in_their_row(device):
    x = torch.randn(4, 130, device=device)
    x[1, 7], x[2, 129] = float("inf"), float("nan")
    y = fused_layer_norm(x, 130)
    assert y[[0, 3]].isfinite().all()
    assert y[[1, 2]].isnan().all()


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_gradcheck(memory_efficient, device):
    x, weight, bias, _ = operands((3, 7), torch.float64, device)
    weight = torch.copysign(weight.abs() + 0.5, weight)
    x, weight, bias = (t.requires_grad_() for t in (x, weight, bias))
    affine = lambda *args: FusedLayerNormAffineFunction.apply(*args, 7, EPS, memory_efficient)
    assert torch.autograd.gradcheck(affine, (x, weight, bias))
    plain = lambda x: FusedLayerNormFunction.apply(x, (7,), EPS, memory_efficient)
    assert torch.autograd.gradcheck(plain, (x,))


def test_only_wanted_gradients(device):
    x, weight, bias, dy = operands((5, 33), torch.float32, device)
    _, dx, dweight, dbias = outputs_and_grads(apex_norm, x, weight, bias, dy)
    for wanted in ((0,), (1,), (2,), (0, 2)):
        inputs = [t.detach().requires_grad_(i in wanted) for i, t in enumerate((x, weight, bias))]
        apex_norm(*inputs).backward(dy)
        for i, expected in enumerate((dx, dweight, dbias)):
            grad = inputs[i].grad
            assert torch.equal(grad, expected) if i in wanted else grad is None


def test_weight_gradient_is_deterministic(device):
    arguments = operands((3000, 257), torch.bfloat16, device)
    first = outputs_and_grads(apex_norm, *arguments)
    for _ in range(3):
        for a, b in zip(first, outputs_and_grads(apex_norm, *arguments), strict=True):
            assert torch.equal(a, b)


def test_second_derivative(device):
    x, weight, bias, _ = operands((3, 5), torch.float64, device)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradgradcheck(apex_norm, inputs)
    assert torch.autograd.gradgradcheck(lambda x: fused_layer_norm(x, 5, EPS), inputs[:1])
    # Of a layout that the kernels do not take, and of another dtype than the weight's.
    mixed = lambda x: mixed_dtype_fused_layer_norm_affine(x.t(), weight[:3], bias[:3], 3, EPS)
    assert torch.autograd.gradgradcheck(mixed, inputs[:1])


def test_second_derivative_of_memory_efficient_is_refused(device):
    """Also where the output's gradient is a constant, as in a gradient penalty."""
    x, weight, bias, _ = operands((2, 8), torch.float32, device)
    affine = fused_layer_norm_affine(x.requires_grad_(), weight, bias, 8, EPS, True)
    for y in (affine, fused_layer_norm(x, 8, EPS, True)):
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            dx.square().sum().backward()
