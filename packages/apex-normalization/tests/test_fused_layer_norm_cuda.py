"""The legacy module: positional signatures, results, and ImportError where kernels cannot run."""

import importlib
import inspect
import sys

import fused_layer_norm_cuda as legacy
import pytest
import torch

from apex.normalization._ops import library
from apex.normalization.fused_layer_norm import (
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)

EPS = 1e-5
SIGNATURES = {
    "forward": "input, normalized_shape, eps",
    "forward_affine": "input, normalized_shape, gamma, beta, eps",
    "forward_affine_mixed_dtypes": "input, normalized_shape, gamma, beta, eps",
    "backward": "dout, mean, invvar, input_or_output, normalized_shape, eps, memory_efficient",
    "backward_affine": "dout, mean, invvar, input_or_output, normalized_shape, gamma, beta, eps, "
    "memory_efficient",
    "rms_forward": "input, normalized_shape, eps",
    "rms_forward_affine": "input, normalized_shape, gamma, eps",
    "rms_forward_affine_mixed_dtypes": "input, normalized_shape, gamma, eps",
    "rms_backward": "dout, invvar, input_or_output, normalized_shape, eps, memory_efficient",
    "rms_backward_affine": "dout, invvar, input_or_output, normalized_shape, gamma, eps, "
    "memory_efficient",
}


def test_signatures():
    assert set(SIGNATURES) == set(legacy.__all__)
    for name, arguments in SIGNATURES.items():
        assert list(inspect.signature(getattr(legacy, name)).parameters) == arguments.split(", ")


@pytest.mark.parametrize("efficient", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32)], ids=str)
def test_layer_norm(dtypes, efficient, device):
    x = torch.randn(5, 33, device=device, dtype=dtypes[0])
    # Each aligned, as its copies below: a GPU sums in another order where vectors cannot be read.
    gamma, beta = (torch.rand(33, device=device, dtype=dtypes[1]) + 0.5 for _ in range(2))
    dout = torch.randn(5, 33, device=device, dtype=dtypes[1])
    inputs = [t.clone().requires_grad_() for t in (x, gamma, beta)]
    expected = mixed_dtype_fused_layer_norm_affine(*inputs, 33, EPS, efficient)
    grads = torch.autograd.grad(expected, inputs, dout)

    y, mean, invvar = legacy.forward_affine_mixed_dtypes(x, (33,), gamma, beta, EPS)
    assert torch.equal(y, expected)
    assert mean.shape == invvar.shape == (5,)
    assert mean.dtype == torch.float32
    saved, mean = (y, None) if efficient else (x, mean)
    actual = legacy.backward_affine(dout, mean, invvar, saved, (33,), gamma, beta, EPS, efficient)
    for a, e in zip(actual, grads, strict=True):
        assert torch.equal(a.to(e.dtype), e)
    if dtypes[0] == dtypes[1]:
        assert torch.equal(legacy.forward_affine(x, (33,), gamma, beta, EPS)[0], expected)


@pytest.mark.parametrize("efficient", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32)], ids=str)
def test_rms_norm(dtypes, efficient, device):
    x = torch.randn(5, 33, device=device, dtype=dtypes[0])
    gamma = torch.rand(33, device=device, dtype=dtypes[1]) + 0.5
    dout = torch.randn(5, 33, device=device, dtype=dtypes[1])
    inputs = [t.clone().requires_grad_() for t in (x, gamma)]
    expected = mixed_dtype_fused_rms_norm_affine(*inputs, 33, EPS, efficient)
    grads = torch.autograd.grad(expected, inputs, dout)

    y, invvar = legacy.rms_forward_affine_mixed_dtypes(x, (33,), gamma, EPS)
    assert torch.equal(y, expected)
    saved = y if efficient else x
    actual = legacy.rms_backward_affine(dout, invvar, saved, (33,), gamma, EPS, efficient)
    for a, e in zip(actual, grads, strict=True):
        assert torch.equal(a.to(e.dtype), e)
    if dtypes[0] == dtypes[1]:
        assert torch.equal(legacy.rms_forward_affine(x, (33,), gamma, EPS)[0], expected)


@pytest.mark.parametrize("efficient", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_float64_beside_another_dtype(dtypes, efficient, device):
    x = torch.randn(5, 33, device=device, dtype=dtypes[0])
    gamma, beta = (torch.rand(33, device=device, dtype=dtypes[1]) + 0.5 for _ in range(2))
    dout = torch.randn(5, 33, device=device, dtype=dtypes[1])
    y, mean, invvar = legacy.forward_affine_mixed_dtypes(x, (33,), gamma, beta, EPS)
    z, scale = legacy.rms_forward_affine_mixed_dtypes(x, (33,), gamma, EPS)
    assert [t.dtype for t in (mean, invvar, scale)] == [dtypes[0]] * 3
    saved, mean = (y, None) if efficient else (x, mean)
    layer = legacy.backward_affine(dout, mean, invvar, saved, (33,), gamma, beta, EPS, efficient)
    saved = z if efficient else x
    rms = legacy.rms_backward_affine(dout, scale, saved, (33,), gamma, EPS, efficient)
    inputs = [t.clone().requires_grad_() for t in (x, gamma, beta)]
    for function, actual in (
        (mixed_dtype_fused_layer_norm_affine, layer),
        (mixed_dtype_fused_rms_norm_affine, rms),
    ):
        tensors = inputs[: len(actual)]
        expected = torch.autograd.grad(function(*tensors, 33, EPS, efficient), tensors, dout)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.to(e.dtype), e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("efficient", [False, True])
def test_gradients_of_weights_have_their_shape(efficient, device):
    x, dout = torch.randn(2, 5, 3, 11, device=device)
    gamma, beta = torch.rand(2, 3, 11, device=device) + 0.5
    shape = (3, 11)
    flat = [t.flatten(-2) for t in (dout, x, gamma, beta)]
    y, mean, invvar = legacy.forward_affine(x, shape, gamma, beta, EPS)
    saved, flat_saved = (y, y.flatten(1)) if efficient else (x, flat[1])
    given = (shape, gamma, beta, EPS, efficient)
    actual = legacy.backward_affine(dout, mean, invvar, saved, *given)
    given = ((33,), *flat[2:], EPS, efficient)
    expected = legacy.backward_affine(flat[0], mean, invvar, flat_saved, *given)
    for a, e, like in zip(actual, expected, (x, gamma, beta), strict=True):
        assert a.shape == like.shape
        assert torch.equal(a.flatten(), e.flatten())


def test_not_affine_equals_weights_of_one(device):
    x, dout = torch.randn(2, 5, 33, device=device)
    one, zero = torch.ones(33, device=device), torch.zeros(33, device=device)
    plain, affine = legacy.forward(x, (33,), EPS), legacy.forward_affine(x, (33,), one, zero, EPS)
    for p, a in zip(plain, affine, strict=True):
        assert torch.equal(p, a)
    dx = legacy.backward(dout, *plain[1:], x, (33,), EPS, False)
    expected = legacy.backward_affine(dout, *plain[1:], x, (33,), one, zero, EPS, False)[0]
    assert torch.equal(dx, expected)
    y, invvar = legacy.rms_forward(x, (33,), EPS)
    assert torch.equal(y, legacy.rms_forward_affine(x, (33,), one, EPS)[0])
    dx = legacy.rms_backward(dout, invvar, x, (33,), EPS, False)
    assert torch.equal(dx, legacy.rms_backward_affine(dout, invvar, x, (33,), one, EPS, False)[0])


def test_backwards_without_memory_efficient():
    """Older callers leave it out: False."""
    x, dout = torch.randn(2, 5, 33)
    gamma, beta = torch.rand(2, 33) + 0.5
    _, mean, invvar = legacy.forward_affine(x, (33,), gamma, beta, EPS)
    calls = [
        (legacy.backward, (dout, mean, invvar, x, (33,), EPS)),
        (legacy.backward_affine, (dout, mean, invvar, x, (33,), gamma, beta, EPS)),
        (legacy.rms_backward, (dout, invvar, x, (33,), EPS)),
        (legacy.rms_backward_affine, (dout, invvar, x, (33,), gamma, EPS)),
    ]
    for function, given in calls:
        torch.testing.assert_close(function(*given), function(*given, False), rtol=0, atol=0)


def test_refusals():
    x, w = torch.randn(4, 6), torch.ones(6)
    with pytest.raises(TypeError, match="forward_affine: weight is float16, but input is float32"):
        legacy.forward_affine(x, (6,), w.half(), w.half(), EPS)
    _, mean, invvar = legacy.forward(x, (6,), EPS)
    with pytest.raises(RuntimeError, match="mean must be a tensor, got None"):
        legacy.backward(x, None, invvar, x, (6,), EPS, False)
    with pytest.raises(ValueError, match=r"backward_affine: weight has shape \[5\]"):
        legacy.backward_affine(x, mean, invvar, x, (6,), torch.ones(5), w, EPS, False)
    with pytest.raises(ValueError, match=r"dout must have the shape .* \[4, 6\]; got \[2, 12\]"):
        legacy.backward(x.view(2, 12), mean, invvar, x, (6,), EPS, False)
    with pytest.raises(TypeError, match=r"rms_backward_affine: dout .* torch.float32; got .*16"):
        legacy.rms_backward_affine(x.half(), invvar, x, (6,), w, EPS, False)


def test_import_error_where_kernels_cannot_run(monkeypatch):
    """So that `try: import ...; except ImportError:` of other projects finds its fallback."""
    monkeypatch.setattr(library, "manifest", dict)
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.setenv("APEX_JIT", "0")
    monkeypatch.delitem(sys.modules, "fused_layer_norm_cuda")
    with pytest.raises(
        ImportError, match=r"neither prebuilt .* nor can they .* APEX_JIT=0"
    ) as info:
        importlib.import_module("fused_layer_norm_cuda")
    assert info.value.name == "fused_layer_norm_cuda"
