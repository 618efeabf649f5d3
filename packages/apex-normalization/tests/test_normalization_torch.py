"""Normalization within torch: opcheck, torch.compile, autocast, and refusals of bad input."""

import pytest
import torch

from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
    ops,
)
from apex_testkit import FLOATS, HALVES, assert_compiles, opcheck_samples

EPS = 1e-5


def layer_norm_samples(dtype, device):
    """Arguments of forward and backward for every combination of weight, bias and saved tensor."""
    x, dy = torch.randn(2, 3, 4, 33, device=device, dtype=dtype)
    weight, bias = torch.rand(2, 33, device=device, dtype=dtype) + 0.5
    forward = [(x, w, b, 33, EPS) for w, b in ((weight, bias), (weight, None), (None, None))]
    forward.append((x[:0], weight, bias, 33, EPS))
    y, mean, rstd = ops.layer_norm_forward(x, weight, bias, 33, EPS)
    backward = [
        (dy, x, weight, mean, rstd, 33, True),
        (dy, x, weight, mean, rstd, 33, False),
        (dy, x, None, mean, rstd, 33, False),
        (dy[:0], x[:0], weight, mean[:0], rstd[:0], 33, True),
    ]
    from_output = [
        (dy, y, weight, bias, rstd, 33, EPS, True),
        (dy, y, weight, None, rstd, 33, EPS, False),
    ]
    return forward, backward, from_output


def rms_norm_samples(dtype, device):
    x, dy = torch.randn(2, 3, 4, 33, device=device, dtype=dtype)
    weight = torch.rand(33, device=device, dtype=dtype) + 0.5
    forward = [(x, weight, 33, EPS), (x, None, 33, EPS), (x[:0], weight, 33, EPS)]
    y, rstd = ops.rms_norm_forward(x, weight, 33, EPS)
    backward = [
        (dy, x, weight, rstd, 33, True),
        (dy, x, None, rstd, 33, False),
    ]
    return forward, backward, [(dy, y, weight, rstd, 33, EPS, True)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_opcheck(dtype, device):
    forward, backward, from_output = layer_norm_samples(dtype, device)
    opcheck_samples(ops.layer_norm_forward, forward)
    opcheck_samples(ops.layer_norm_backward, backward)
    opcheck_samples(ops.layer_norm_backward_from_output, from_output)
    forward, backward, from_output = rms_norm_samples(dtype, device)
    opcheck_samples(ops.rms_norm_forward, forward)
    opcheck_samples(ops.rms_norm_backward, backward)
    opcheck_samples(ops.rms_norm_backward_from_output, from_output)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_opcheck_float32_weights(dtype, device):
    x = torch.randn(4, 33, device=device, dtype=dtype)
    weight, bias = torch.randn(2, 33, device=device)
    opcheck_samples(ops.layer_norm_forward, [(x, weight, bias, 33, EPS)])
    opcheck_samples(ops.rms_norm_forward, [(x, weight, 33, EPS)])


FUNCTIONS = {
    "layer_norm_affine": lambda x, w, b: fused_layer_norm_affine(x, w, b, 33),
    "layer_norm": lambda x, w, b: fused_layer_norm(x, 33),
    "layer_norm_mixed": lambda x, w, b: mixed_dtype_fused_layer_norm_affine(x, w, b, 33),
    "layer_norm_efficient": lambda x, w, b: fused_layer_norm_affine(x, w, b, 33, 1e-6, True),
    "layer_norm_function": lambda x, w, b: FusedLayerNormAffineFunction.apply(x, w, b, (33,), EPS),
    "rms_norm_affine": lambda x, w, b: fused_rms_norm_affine(x, w, 33),
    "rms_norm": lambda x, w, b: fused_rms_norm(x, 33),
    "rms_norm_mixed": lambda x, w, b: mixed_dtype_fused_rms_norm_affine(x, w, 33),
    "rms_norm_efficient": lambda x, w, b: fused_rms_norm_affine(x, w, 33, 1e-6, True),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_functions_compile(function, device):
    x, weight, bias = (torch.randn(s, device=device) for s in ((4, 33), (33,), (33,)))
    assert_compiles(function, *(t.requires_grad_() for t in (x, weight, bias)))


@pytest.mark.parametrize(
    "kind", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm]
)
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_modules_compile(kind, memory_efficient, device):
    module = kind(33, memory_efficient=memory_efficient).to(device)
    assert_compiles(module, torch.randn(4, 33, device=device, requires_grad=True))


def test_dynamic_batch_compiles_once(device):
    module = FusedLayerNorm(33).to(device)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    compiled(torch.randn(5, 33, device=device))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (8, 21):
            x = torch.randn(rows, 33, device=device)
            assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast(name, dtype, device):
    """Everything is cast to the autocast dtype, which is the output's; gradients keep theirs."""
    x, weight, bias = (torch.randn(s, device=device) for s in ((4, 33), (33,), (33,)))
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    with torch.autocast(device.type, dtype):
        y = FUNCTIONS[name](*inputs)
    if name == "layer_norm_function":  # applied directly: takes tensors as they are
        assert y.dtype == torch.float32
        return
    assert torch.equal(y, FUNCTIONS[name](*(t.to(dtype) for t in inputs)))
    y.float().sum().backward()
    assert all(t.grad is None or t.grad.dtype == torch.float32 for t in inputs)
    assert x.grad is not None


def test_autocast_leaves_float64_alone(device):
    module = FusedLayerNorm(33, dtype=torch.float64, device=device)
    x = torch.randn(4, 33, dtype=torch.float64, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(module(x), module(x.clone()))
        assert module(x).dtype == torch.float64


def test_autocast_compiles(device):
    module = FusedRMSNorm(33).to(device)

    def step(x):
        with torch.autocast(device.type, torch.bfloat16):
            return module(x)

    assert_compiles(step, torch.randn(4, 33, device=device, requires_grad=True))


def test_linear_output_feeds_the_norm_under_autocast(device):
    """A bf16 activation meets fp32 parameters: the case that autocast exists for."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), FusedLayerNorm(33)).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        model(torch.randn(4, 16, device=device)).sum().backward()
    assert model[1].weight.grad.dtype == torch.float32


X, W = torch.randn(4, 6), torch.randn(6)
REFUSALS = {
    "shape": (ValueError, r"normalized_shape is \[5\], but .* \[6\]", (X, torch.ones(5), None, 5)),
    "dims": (ValueError, r"normalized_shape is \[3, 4, 6\]", (X, W, None, (3, 4, 6))),
    "empty shape": (ValueError, "at least one dimension", (X, W, None, ())),
    "weight": (ValueError, r"weight has shape \[5\]", (X, torch.ones(5), None, 6)),
    "bias": (ValueError, r"bias has shape \[1, 6\]", (X, W, W[None], 6)),
    "integer": (TypeError, "must be a float64, .* got torch.int64", (X.long(), W, None, 6)),
    "no tensor": (TypeError, "got list", ([1.0] * 6, W, None, 6)),
    "bias dtype": (TypeError, "bias is float16, but weight is float32", (X, W, W.half(), 6)),
    "integer weight": (TypeError, "weight must be a floating-point tensor", (X, W.long(), None, 6)),
    "weight of a list": (TypeError, "weight must be a .* tensor, got list", (X, [1.0], None, 6)),
    "bias of a number": (TypeError, "bias must be a .* tensor, got float", (X, W, 0.5, 6)),
    "bias alone": (ValueError, "a bias was given without a weight", (X, None, W, 6)),
    "device": (ValueError, "weight is on meta, but input is on cpu", (X, W.to("meta"), None, 6)),
    "eps": (ValueError, "eps must be finite and not negative, got -1", (X, W, None, 6, -1.0)),
}


@pytest.mark.parametrize(("error", "text", "arguments"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(error, text, arguments):
    with pytest.raises(error, match=text):
        fused_layer_norm_affine(*arguments)


@pytest.mark.parametrize(
    "module", [FusedLayerNorm(6), FusedRMSNorm(6)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("to", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_tensors_that_are_not_dense_are_refused(module, to):
    with pytest.raises(NotImplementedError, match=r"input is of layout .*Use input.to_dense\(\)"):
        module(getattr(X.float(), to)())


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"input must not be a nested tensor. .* values\(\)"):
        fused_layer_norm_affine(nested, W, None, 6)


def test_kernels_check_what_python_did_not():
    """Raw ops raise instead of reading memory that is not theirs."""
    for arguments, text in [
        ((X, W, None, 5, EPS), "24 elements, which is no multiple of columns = 5"),
        ((X, W, None, 0, EPS), "columns must be positive"),
        ((X.t(), W[:4], None, 4, EPS), "x must be contiguous"),
        ((X, W[:5], None, 6, EPS), "weight must be contiguous, with 6 elements"),
        ((X, W.double(), None, 6, EPS), "no kernel for input in float32 with weight in float64"),
        ((X.long(), None, None, 6, EPS), "got int64"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.layer_norm_forward(*arguments)
    _, mean, rstd = ops.layer_norm_forward(X, W, None, 6, EPS)
    for arguments, text in [
        ((X[:3], X, W, mean, rstd), "dy must be contiguous, with 24 elements"),
        ((X, X, W, mean, rstd[:2]), "rstd must be"),
        ((X, X, W, None, rstd), "mean must be a tensor, got None"),
        ((X, X, None, mean, rstd), "weight_grads needs a weight"),
        ((X, X, W, mean.double(), rstd), "mean must be"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.layer_norm_backward(*arguments, 6, True)
    with pytest.raises(RuntimeError, match="y and dy must have one dtype, got float16 and float32"):
        ops.layer_norm_backward_from_output(X, X.half(), W, None, rstd, 6, EPS, True)
