"""Residual add and normalization in one op, against float64 and against its two steps."""

import pytest
import torch

from apex.normalization import fused_add_layer_norm, fused_add_rms_norm
from apex.normalization.fused_add_norm import ops
from apex.normalization.fused_layer_norm import fused_layer_norm_affine
from apex_testkit import (
    FLOATS,
    HALVES,
    LAYOUTS,
    SHAPES,
    assert_as_accurate_as,
    assert_compiles,
    opcheck_samples,
)

EPS = 1e-5
# More rows than a GPU has threads for: blocks that add up columns stay for several.
NORM_SHAPES = {**SHAPES, "one": (1, 33), "many": (4160, 8)}
KINDS = ["layer", "rms"]
WIDE = torch.float32
# x, residual, weight: the kernels' combinations beside one dtype for all, and some that are cast.
TRIPLES = [
    *((h, r, w) for h in HALVES for r, w in ((h, WIDE), (WIDE, WIDE), (WIDE, h))),
    (torch.float16, torch.bfloat16, torch.bfloat16),
    (WIDE, torch.bfloat16, torch.float16),
]


def formula(kind, total, weight, bias):
    if kind == "layer":
        total = total - total.mean(-1, keepdim=True)
    y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight
    return y + bias if kind == "layer" else y


def apex_norm(kind, x, residual, weight, bias):
    if kind == "layer":
        return fused_add_layer_norm(x, residual, weight, bias, EPS, prenorm=True)
    return fused_add_rms_norm(x, residual, weight, EPS, prenorm=True)


def operands(shape, device, *dtypes):
    """x, residual, weight, bias, and the gradients of output and sum."""
    x_dtype, residual_dtype, weight_dtype = dtypes if len(dtypes) == 3 else dtypes * 3
    x, dy = torch.randn(2, *shape, device=device, dtype=x_dtype)
    residual = torch.randn(shape, device=device, dtype=residual_dtype)
    weight, bias = torch.randn(2, shape[-1], device=device, dtype=weight_dtype)
    dsum = torch.randn(shape, device=device, dtype=torch.promote_types(x_dtype, residual_dtype))
    return x, residual, weight, bias, dy, dsum


def outputs_and_grads(kind, x, residual, weight, bias, dy, dsum):
    """Return y, dx, dresidual, dweight and, of layer norm, dbias."""
    inputs = [t.detach().requires_grad_() for t in (x, residual, weight, bias)]
    y, total = apex_norm(kind, *inputs)
    assert torch.equal(total, x + residual)
    inputs = inputs if kind == "layer" else inputs[:3]
    return y.detach(), *torch.autograd.grad((y, total), inputs, (dy, dsum))


def check(kind, arguments, actual):
    """Check against the formula on the sum as it was stored; its gradient is x's and residual's."""
    x, residual, weight, bias, dy, dsum = arguments
    total = x + residual

    def reference(total, weight, bias, dy, dsum):
        inputs = [t.detach().requires_grad_() for t in (total, weight, bias)]
        y = formula(kind, *inputs)
        grads = torch.autograd.grad(y, inputs[: 3 if kind == "layer" else 2], dy)
        return y.detach(), grads[0] + dsum, grads[0] + dsum, *grads[1:]

    assert_as_accurate_as(lambda *a: reference(*a)[:3], actual[:3], total, weight, bias, dy, dsum)
    rows = x.shape[0]
    # Three in float64, whose truth errs as well: of (1, 33) truth's dweight is off by 1.1e-15,
    # ours by 6.8e-16 (by numbers of 80 bits).
    stores = max(3.0, (rows / 32) ** 0.5) if x.dtype == torch.float64 else 1.0
    assert_as_accurate_as(
        lambda *a: reference(*a)[3:], actual[3:], total, weight, bias, dy, dsum, ulps=stores
    )


@pytest.mark.parametrize("kind", KINDS)
def test_packs_of_rows_that_a_gpu_does_not_keep(kind, device):
    arguments = operands((5, 34), device, torch.float64)
    check(kind, arguments, outputs_and_grads(kind, *arguments))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES.values(), ids=NORM_SHAPES.keys())
def test_one_dtype(shape, dtype, kind, device):
    arguments = operands(shape, device, dtype)
    actual = outputs_and_grads(kind, *arguments)
    assert {t.dtype for t in actual} == {dtype}
    check(kind, arguments, actual)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", TRIPLES, ids=str)
def test_mixed_dtypes(dtypes, kind, device):
    arguments = operands((9, 131), device, *dtypes)
    y, *grads = outputs_and_grads(kind, *arguments)
    assert y.dtype == dtypes[0]
    assert [g.dtype for g in grads] == [*dtypes, dtypes[2]][: len(grads)]
    check(kind, arguments, (y, *grads))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_stored_sum_is_what_is_normalized(dtype, device):
    """Sums of every size of a 16-bit type: ties, subnormals and overflow are rounded as torch's."""
    exponents = torch.arange(-26, 17, device=device).double().exp2()
    x = (torch.randn(len(exponents), 64, device=device).double() * exponents[:, None]).to(dtype)
    x = x.clamp(-60_000, 60_000)
    residual = torch.roll(x, 1, dims=1) / 2
    y, total = fused_add_rms_norm(x, residual, x.new_ones(64), 1e-15, prenorm=True)
    assert torch.equal(total, x + residual)
    finite = total.isfinite().all(1)
    assert finite.sum() >= 41
    assert_as_accurate_as(
        lambda t: t * torch.rsqrt(t.square().mean(1, keepdim=True) + 1e-15),
        y[finite],
        total[finite],
    )
    x[:, 0], residual[:, 0] = float("inf"), float("-inf")
    x[:, 1] = float("nan")
    _, total = fused_add_rms_norm(x, residual, x.new_ones(64), prenorm=True)
    assert total[:, :2].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_options(kind, dtype, device):
    """Without prenorm the sum stays inside, without bias it is zero; the rest is the same."""
    arguments = operands((5, 67), device, dtype)
    x, residual, weight, _, dy, _ = arguments
    zero = torch.zeros_like(dy)
    expected = outputs_and_grads(kind, *arguments[:3], torch.zeros_like(weight), dy, zero)
    inputs = [t.detach().requires_grad_() for t in (x, residual, weight)]
    norm = fused_add_layer_norm if kind == "layer" else fused_add_rms_norm
    y = norm(*inputs, eps=EPS)
    grads = torch.autograd.grad(y, inputs, dy)
    for a, e in zip((y, *grads), expected, strict=False):
        assert torch.equal(a, e)
    with torch.no_grad():
        assert torch.equal(norm(*inputs, eps=EPS), y)
    _, total = norm(*inputs, eps=EPS, prenorm=True)
    for grad in torch.autograd.grad(total, inputs[:2], dy):
        assert torch.equal(grad, dy)
    frozen = [t.detach().requires_grad_(i < 2) for i, t in enumerate(inputs)]
    norm(*frozen, eps=EPS).backward(dy)
    assert torch.equal(frozen[0].grad, expected[1])
    assert frozen[2].grad is None


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout, device):
    arguments = operands((6, 67), device, torch.bfloat16)
    for kind in KINDS:
        expected = outputs_and_grads(kind, *arguments)
        actual = outputs_and_grads(kind, *(layout(a) for a in arguments))
        for a, e in zip(actual, expected, strict=True):
            assert a.is_contiguous()
            # A GPU sums in another order where packs cannot be read.
            torch.testing.assert_close(a, e, rtol=2**-7, atol=2**-7)


def test_bias_of_another_layout(device):
    x, residual, weight, bias, *_ = operands((6, 67), device, torch.float32)
    expected = apex_norm("layer", x, residual, weight, bias)
    with torch.no_grad():
        strided = torch.stack([bias, bias + 1], 1)[:, 0]
        for actual, e in zip(
            apex_norm("layer", x, residual, weight, strided), expected, strict=True
        ):
            torch.testing.assert_close(actual, e)


def test_several_dimensions(device):
    x, residual = torch.randn(2, 5, 3, 8, device=device)
    weight, bias = torch.randn(2, 3, 8, device=device)
    y, total = fused_add_layer_norm(x, residual, weight, bias, EPS, prenorm=True)
    assert torch.equal(total, x + residual)
    expected = fused_layer_norm_affine(total, weight, bias, (3, 8), EPS)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


def test_offset_does_not_cancel(device):
    x = torch.randn(4, 512, device=device)
    residual, weight, bias = torch.full_like(x, 1e4), x[0], x[1]
    y, total = fused_add_layer_norm(x, residual, weight, bias, EPS, prenorm=True)
    assert_as_accurate_as(lambda *a: formula("layer", *a), y, total, weight, bias)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, device):
    x, residual, weight, bias, *_ = operands((3, 5), device, torch.float64)
    inputs = [t.requires_grad_() for t in (x, residual, weight, bias)]
    inputs = inputs if kind == "layer" else inputs[:3]
    norm = lambda *a: apex_norm(kind, *a, *([None] * (4 - len(a))))
    assert torch.autograd.gradcheck(norm, inputs)
    assert torch.autograd.gradgradcheck(norm, inputs)


def samples(dtype, device):
    """Arguments of the four ops."""
    x, residual, weight, bias, dy, dsum = operands((4, 33), device, dtype)
    _, total, mean, rstd = ops.add_layer_norm_forward(x, residual, weight, bias, 33, EPS)
    return {
        ops.add_layer_norm_forward: [(x, residual, weight, b, 33, EPS) for b in (bias, None)],
        ops.add_rms_norm_forward: [(x, residual, weight, 33, EPS)],
        ops.add_layer_norm_backward: [
            (dy, dsum, total, weight, mean, rstd, 33, True),
            (dy, None, total, weight, mean, rstd, 33, False),
        ],
        ops.add_rms_norm_backward: [
            (dy, dsum, total, weight, rstd, 33, True),
            (dy, None, total, weight, rstd, 33, False),
        ],
    }


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_sums_in_the_weights_dtype(kind, create_graph, device):
    """Beyond float16's range, in which x and the output are."""
    rows = 70_000
    x = torch.randn(rows, 8, device=device).half().requires_grad_()
    weight, bias = torch.ones(8, device=device), torch.zeros(8, device=device)
    inputs = (weight.requires_grad_(), *([bias.requires_grad_()] if kind == "layer" else []))
    y = (fused_add_layer_norm if kind == "layer" else fused_add_rms_norm)(x, x.detach(), *inputs)
    dy = y.detach() if kind == "rms" else torch.ones_like(y)
    sums = torch.autograd.grad(y, inputs, dy, create_graph=create_graph)[-1]
    expected = (dy.double() * (y.detach().double() if kind == "rms" else 1)).sum(0)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck(dtype, device):
    for op, arguments in samples(dtype, device).items():
        opcheck_samples(op, arguments)


def test_opcheck_two_gradients(device):
    """A float32 residual beside a 16-bit x: the op returns both gradients."""
    x, residual, weight, _, dy, dsum = operands((4, 33), device, torch.half, WIDE, WIDE)
    _, total, rstd = ops.add_rms_norm_forward(x, residual, weight, 33, EPS)
    opcheck_samples(ops.add_rms_norm_backward, [(dy, dsum, total, weight, rstd, 33, True)])


@pytest.mark.parametrize("kind", KINDS)
def test_compiles(kind, device):
    x, residual, weight, bias, *_ = operands((4, 33), device, WIDE)
    inputs = [t.requires_grad_() for t in (x, residual, weight, bias)]
    assert_compiles(lambda *a: apex_norm(kind, *a), *inputs)


def test_autocast_changes_nothing(device):
    """A 16-bit layer output meets a float32 stream and float32 weights: made for that."""
    x, residual, weight, bias, *_ = operands((4, 33), device, torch.bfloat16, WIDE, WIDE)
    expected = apex_norm("layer", x, residual, weight, bias)
    with torch.autocast(device.type, torch.bfloat16):
        actual = apex_norm("layer", x, residual, weight, bias)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


X, W = torch.randn(4, 6), torch.randn(6)
REFUSALS = {
    "shape": (ValueError, r"residual must have the shape .* got \[6\]", (X, X[0], W)),
    "device": (ValueError, "residual must have .* on meta", (X, X.to("meta"), W)),
    "columns": (ValueError, r"normalized_shape is \[5\]", (X, X, W[:5])),
    "no residual": (TypeError, "residual must be a tensor, got NoneType", (X, None, W)),
    "no weight": (TypeError, "weight must be a tensor, got NoneType", (X, X, None)),
    "scalar weight": (ValueError, "weight must have the shape of the dim", (X, X, W[0])),
    "integer": (TypeError, "must be floating point", (X, X.long(), W)),
    "float64": (TypeError, "x float32, residual float64, weight float32", (X, X.double(), W)),
    "float64 weight": (TypeError, "weight float64", (X, X, W.double())),
    "bias": (TypeError, "bias is float16", (X, X, W, W.half())),
    "eps": (ValueError, "eps must be finite and not negative", (X, X, W, None, -1.0)),
}


@pytest.mark.parametrize(("error", "text", "arguments"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(error, text, arguments):
    with pytest.raises(error, match=text):
        fused_add_layer_norm(*arguments)


def test_kernels_check_what_python_did_not():
    forward = ops.add_layer_norm_forward
    for arguments, text in [
        ((X, X, W, None, 0, EPS), "columns must be positive"),
        ((X, X, W, None, 5, EPS), "no multiple of columns = 5"),
        ((X.t(), X, W, None, 6, EPS), "x must be contiguous"),
        ((X, X[:3], W, None, 6, EPS), "residual must be contiguous, with 24"),
        ((X, X, W[:5], None, 6, EPS), "weight must be contiguous, with 6"),
        ((X, X, W, W.half(), 6, EPS), "bias must be"),
        ((X, X.double(), W, None, 6, EPS), "no kernel for x in float32 with a sum in float64"),
        ((X, X, W.half(), None, 6, EPS), "weight in float16"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            forward(*arguments)
    _, total, mean, rstd = forward(X, X, W, None, 6, EPS)
    for arguments, text in [
        ((X, X[:2], total, W, mean, rstd), "dsum must be"),
        ((X, None, total, W, mean[:2], rstd), "mean must be"),
        ((X, None, total, W, mean, rstd.double()), "rstd must be"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.add_layer_norm_backward(*arguments, 6, True)
