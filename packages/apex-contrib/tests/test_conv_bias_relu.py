"""apex.contrib.conv_bias_relu against PyTorch's convolution in float64."""

import inspect
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import apex.contrib.conv_bias_relu.conv_bias_relu as module
from apex.contrib._shared.native import half_matmul
from apex.contrib.conv_bias_relu import (
    ConvBias,
    ConvBiasMaskReLU,
    ConvBiasReLU,
    ConvFrozenScaleBiasReLU,
    decompositions,
)
from apex.contrib.dense_epilogue import dense_activation_backward
from apex_testkit import FLOATS, assert_as_accurate_as
from apex_testkit.formulas import CHECKS, Case

HALVES = torch.float16, torch.bfloat16

# name: ours, and what is before the ReLU in plain PyTorch
BEFORE = {
    "relu": (ConvBiasReLU, lambda x, w, b, p, s: F.conv2d(x, w, b.flatten(), s, p)),
    "bias": (ConvBias, lambda x, w, b, p, s: F.conv2d(x, w, b.flatten(), s, p)),
    "mask": (ConvBiasMaskReLU, lambda x, w, b, m, p, s: F.conv2d(x, w, b.flatten(), s, p) * m),
    "frozen": (
        ConvFrozenScaleBiasReLU,
        lambda x, w, c, b, p, s: F.conv2d(x, w, None, s, p) * c.view(-1, 1, 1) + b.view(-1, 1, 1),
    ),
}


def plain_of(name):
    before = BEFORE[name][1]
    return before if name == "bias" else lambda *given: torch.relu(before(*given))


FUNCTIONS = {name: (function, plain_of(name)) for name, (function, _) in BEFORE.items()}
SHAPES = {  # x, weight, padding, stride
    "3x3": ((2, 7, 6, 5), (9, 7, 3, 3), 1, 1),
    "1x1": ((3, 16, 5, 5), (8, 16, 1, 1), 0, 1),
    "strided": ((2, 5, 9, 8), (4, 5, 3, 3), 1, 2),
    "pairs": ((1, 3, 7, 8), (4, 3, 3, 1), (1, 0), (2, 3)),
    "one element": ((1, 1, 1, 1), (1, 1, 1, 1), 0, 1),
    "no samples": ((0, 3, 4, 4), (2, 3, 3, 3), 1, 1),
}


def operands(name, shape, dtype, device, shape_of_vectors=(1, -1, 1, 1)):
    """All arguments, and how many of them have gradients."""
    of_x, of_weight, padding, stride = shape
    fan_in = max(torch.Size(of_weight[1:]).numel(), 1)
    x = torch.randn(of_x, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
    weight = (torch.randn(of_weight, device=device) / fan_in**0.5).to(dtype)
    vectors = [torch.randn(of_weight[0], device=device).to(dtype) for _ in range(2)]
    scale, bias = (vector.reshape(shape_of_vectors) for vector in vectors)
    if name == "frozen":
        return [x, weight, scale, bias, padding, stride], 2
    if name != "mask":
        return [x, weight, bias, padding, stride], 3
    y = F.conv2d(x.float(), weight.float(), None, stride, padding)
    return [x, weight, bias, torch.rand_like(y).round().to(dtype), padding, stride], 3


def with_gradients(function, count, dy, *given):
    given = list(given)
    leaves = given[:count] = [t.detach().requires_grad_() for t in given[:count]]
    y = function(*given)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def reference_of(name, count, y):
    """Whose ReLU passes gradients where ``y`` is positive: near 0 that is a matter of rounding."""
    _, before = BEFORE[name]

    def reference(dy, *given):
        dy = dy if name == "bias" else dy * (y > 0)
        p, *gradients = with_gradients(before, count, dy, *given)
        return p if name == "bias" else p.relu(), *gradients

    return reference


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, name, device):
    function, _ = FUNCTIONS[name]
    given, count = operands(name, shape, dtype, device)
    with torch.no_grad():
        alone = function(*given)
    dy = torch.randn_like(alone)
    actual = with_gradients(function, count, dy, *given)
    reference = reference_of(name, count, actual[0])
    # The product, and what the scale or the mask makes of it, are rounded in each direction.
    assert_as_accurate_as(reference, actual, dy, *given, ulps=4)
    assert torch.equal(alone, actual[0])
    for image in (alone, *actual[:2]):  # outputs, and the gradient of x
        assert not image.numel() or image.is_contiguous(memory_format=torch.channels_last)
    assert [(g.dtype, g.shape) for g in actual[1:]] == [(t.dtype, t.shape) for t in given[:count]]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_layout_and_shape_of_vectors(name, device):
    function, _ = FUNCTIONS[name]
    torch.manual_seed(0)
    given, count = operands(name, SHAPES["3x3"], torch.float32, device)
    dy = torch.randn_like(function(*given))
    expected = with_gradients(function, count, dy, *given)
    is_vector = lambda t: isinstance(t, torch.Tensor) and t.shape == (1, 9, 1, 1)
    contiguous = [t.flatten() if is_vector(t) else t for t in given]
    contiguous[0] = given[0].contiguous()
    strided = torch.stack([dy, dy], -1)[..., 0]
    for actual in (
        with_gradients(function, count, dy.contiguous(), *contiguous),
        with_gradients(function, count, strided, *contiguous),
    ):
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.reshape(e.shape), e)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.float64], ids=str)
@pytest.mark.parametrize("is_shared", [True, False])
def test_masks(is_shared, dtype, device):
    """Of any dtype, and with dimensions that are 1."""
    (x, weight, bias, mask, *rest), count = operands("mask", SHAPES["3x3"], torch.float32, device)
    mask = mask[:, :1] if is_shared else mask
    dy = torch.randn(2, 9, 6, 5, device=device)
    weighted = mask * 3.0 - 1.0  # no mask of Apex's, but its gradient is right too
    for m, of_oracle in ((mask.to(dtype), mask), (weighted, weighted)):
        actual = with_gradients(ConvBiasMaskReLU, count, dy, x, weight, bias, m, *rest)
        reference = reference_of("mask", count, actual[0])
        assert_as_accurate_as(reference, actual, dy, x, weight, bias, of_oracle, *rest, ulps=4)


def test_constants_get_no_gradient(device):
    for name in ("mask", "frozen"):
        given, count = operands(name, SHAPES["3x3"], torch.float32, device)
        leaves = [t.requires_grad_() if isinstance(t, torch.Tensor) else t for t in given]
        FUNCTIONS[name][0](*leaves).sum().backward()
        got = [t.grad is not None for t in leaves if isinstance(t, torch.Tensor)]
        assert got == [True] * count + [False] * (len(got) - count)


def case(name):
    function, plain = FUNCTIONS[name]
    of_function = lambda x, w, v: function(x, w, *extra(v), 1, 2)
    of_plain = lambda x, w, v: plain(x, w, *extra(v), 1, 2)
    # A frozen scale is no argument of the case, nor a mask: it is made of constants.
    constant = torch.tensor([0.5, -1.5, 2.0])
    extra = {
        "relu": lambda v: (v,),
        "bias": lambda v: (v,),
        "mask": lambda v: (v, (constant > 0).view(1, -1, 1, 1).to(v.device)),
        "frozen": lambda v: (constant.to(v), torch.ones_like(constant).to(v)),
    }[name]
    return Case(
        of_function,
        small,
        of_plain,
        grads=(0, 1) if name == "frozen" else (0, 1, 2),
        rows=(0,),
        operators=(torch.ops.aten.convolution.default, dense_activation_backward),
        decompositions=decompositions,
        ulps=8,  # truth rounds as often: sums of products
        without={"batch invariance": "torch's convolutions choose by size"},
        keeps_output="" if name == "bias" else "The gradient of ReLU is read off the output.",
    )


def small(dtype, device):
    """No sign depends on rounding."""
    torch.manual_seed(0)
    x, weight, *_ = operands("bias", ((2, 2, 4, 3), (3, 2, 3, 2), 1, 2), dtype, device)[0]
    return x / 8, weight, torch.tensor([1.0, -1.0, 2.0], dtype=dtype, device=device)


CASES = {name: case(name) for name in FUNCTIONS}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_composed(name, check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    of_name = CASES[name]
    if check is CHECKS["decompositions"]:
        return  # of our operators: test_dense_epilogue.py has their one
    if name == "bias" and check is CHECKS["compiled"]:
        aten = torch.ops.aten
        backward = aten.convolution_backward.default
        of_name = replace(of_name, operators=(aten.convolution.default, backward))
    if check is CHECKS["export"]:
        of_name = replace(of_name, operators=(torch.ops.aten.conv2d.default, None))
    check(of_name, device)


@pytest.mark.every_torch
def test_compiled_gradients(device):
    """Of each function: torch 2.11 made zeros of those of outputs that were written in place."""
    for name, (function, _) in FUNCTIONS.items():
        given, count = operands(name, SHAPES["3x3"], torch.float64, device)
        torch.compiler.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        dy = torch.randn_like(function(*given))
        expected = with_gradients(function, count, dy, *given)
        torch.testing.assert_close(with_gradients(compiled, count, dy, *given), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast_casts_first_and_stays_outside(name, dtype, device):
    function, _ = FUNCTIONS[name]
    given, count = operands(name, SHAPES["1x1"], torch.float32, device)
    cast = [t.to(dtype) if isinstance(t, torch.Tensor) else t for t in given]
    dy = torch.randn_like(function(*cast))
    expected = with_gradients(function, count, dy, *cast)
    with torch.autocast(device.type, dtype):
        actual = with_gradients(function, count, dy, *given)
        assert function(*[t.double() if isinstance(t, torch.Tensor) else t for t in given]).dtype
    assert actual[0].dtype == dtype
    assert all(torch.equal(a, e.to(a.dtype)) for a, e in zip(actual, expected, strict=True))
    leaves = [t.detach().requires_grad_() for t in given[:count]]
    y = function(*leaves, *given[count:])
    outside = torch.autograd.grad(y, leaves, y.detach(), retain_graph=True)
    with torch.autocast(device.type, dtype):
        assert all(map(torch.equal, torch.autograd.grad(y, leaves, y.detach()), outside))


@pytest.mark.parametrize("is_slow", [True, False], ids=["no arithmetic of 16 bits", "16 bits"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_16_bits_on_both_kinds_of_cpu(dtype, name, is_slow, monkeypatch):
    monkeypatch.setattr(half_matmul, "_slow", HALVES if is_slow else ())
    seen = []
    convolve = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, *w: seen.append(x.dtype) or convolve(x, *w))
    function, _ = FUNCTIONS[name]
    given, count = operands(name, SHAPES["3x3"], dtype, "cpu")
    seen.clear()
    y = with_gradients(function, count, torch.ones(2, 9, 6, 5).to(dtype), *given)
    assert {t.dtype for t in y} == {dtype}
    assert set(seen) == {torch.float32 if is_slow else dtype}


X, W, B, M = torch.ones(2, 3, 4, 4), torch.ones(5, 3, 3, 3), torch.ones(5), torch.ones(2, 5, 4, 4)
BAD = {
    "integers": (TypeError, "x must be a float64", (X.int(), W, B, M, 1, 1)),
    "weight's dtype": (TypeError, "weight is torch.float16", (X, W.half(), B, M, 1, 1)),
    "bias's dtype": (TypeError, "bias is torch.float64", (X, W, B.double(), M, 1, 1)),
    "no bias": (TypeError, "bias is NoneType", (X, W, None, M, 1, 1)),
    "channels": (ValueError, ".* with the same C", (X, W[:, :2], B, M, 1, 1)),
    "dimensions": (ValueError, r"x must have shape \[N, C, H, W\]", (X[0], W, B, M, 1, 1)),
    "bias's size": (ValueError, r"bias must hold .*\[1, 5, 1, 1\]", (X, W, B[:4], M, 1, 1)),
    "device": (ValueError, "weight is on meta", (X, W.to("meta"), B, M, 1, 1)),
    "padding": (ValueError, "padding must be an int >= 0", (X, W, B, M, -1, 1)),
    "stride": (ValueError, "stride must be an int >= 1", (X, W, B, M, 1, 0)),
    "three": (ValueError, "stride must be an int >= 1, or two", (X, W, B, M, 1, (1, 1, 1))),
    "mask": (ValueError, "mask must have the output's four dimensions", (X, W, B, M[0], 1, 1)),
    "mask's shape": (ValueError, "mask must have the output's shape", (X, W, B, M[:, :4], 1, 1)),
    "no mask": (TypeError, "mask must be a tensor", (X, W, B, 1.0, 1, 1)),
    "None for a mask": (TypeError, "mask must be a tensor, got NoneType", (X, W, B, None, 1, 1)),
    "padding's type": (ValueError, "padding must be an int >= 0", (X, W, B, M, 1.0, 1)),
    "window": (ValueError, r"windows of \[3, 3\].* do not fit", (X[:, :, :2], W, B, M, (0, 1), 1)),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD)
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"ConvBiasMaskReLU: {text}"):
        ConvBiasMaskReLU(*given)


def test_a_scale_is_needed():
    with pytest.raises(TypeError, match="ConvFrozenScaleBiasReLU: scale must be a tensor"):
        ConvFrozenScaleBiasReLU(X, W, None, B, 1, 1)


def test_names_of_apex(device):
    for name, of_apex in (
        ("relu", module.ConvBiasReLU_),
        ("bias", module.ConvBias_),
        ("mask", module.ConvBiasMaskReLU_),
        ("frozen", module.ConvFrozenScaleBiasReLU_),
    ):
        function, _ = FUNCTIONS[name]
        given, _ = operands(name, SHAPES["3x3"], torch.float32, device)
        assert torch.equal(of_apex.apply(*given), function(*given))
        assert torch.equal(of_apex.forward(None, *given), function(*given))
        parameters = list(inspect.signature(function).parameters)
        assert inspect.getfullargspec(of_apex.forward).args == ["ctx", *parameters]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extension_module(dtype, device):
    import fused_conv_bias_relu as legacy

    close = lambda a, e: torch.testing.assert_close(a, e.reshape(a.shape))
    for name, forward, backward in (
        ("relu", legacy.forward, legacy.backward),
        ("bias", legacy.forward_no_relu, legacy.backward_no_relu),
        ("mask", legacy.forward_mask, legacy.backward),
        ("frozen", legacy.forward_cscale_cbias_relu, legacy.backward_cscale_cbias_relu),
    ):
        function, _ = FUNCTIONS[name]
        (*tensors, padding, stride), count = operands(name, SHAPES["3x3"], dtype, device)
        dy = torch.randn_like(function(*tensors, padding, stride))
        expected = with_gradients(function, count, dy, *tensors, padding, stride)
        with torch.autocast(device.type, torch.bfloat16):
            (y,) = forward(tensors, padding, stride)
            kept = [*tensors[:2], *([tensors[2]] if name == "frozen" else []), y]
            kept = kept[:-1] if name == "bias" else kept
            gradients = backward([*kept, dy], padding, stride)
        close(y, expected[0])
        assert len(gradients) == count
        for actual, e in zip(gradients, expected[1:], strict=True):
            close(actual, e)
    with pytest.raises(ValueError, match="forward: inputs must be x, weight, bias, but"):
        legacy.forward(tensors[:2], 1, 1)
    with pytest.raises(ValueError, match="backward_no_relu: grad_output must have the output's"):
        legacy.backward_no_relu([*tensors[:2], dy[:, :1]], 1, 1)
