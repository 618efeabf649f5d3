"""fused_weight_gradient_mlp_cuda: in place, as accurate as main_grad's dtype allows."""

import math
import os

import fused_weight_gradient_mlp_cuda as extension
import pytest
import torch

from apex.transformer.weight_gradient import add_weight_gradient, add_weight_gradient_blaslt
from apex_testkit.accuracy import assert_as_accurate_as
from apex_testkit.devices import runs_gpu_kernels

FP32, FP16 = extension.wgrad_gemm_accum_fp32, extension.wgrad_gemm_accum_fp16
HALVES = torch.bfloat16, torch.float16


def product(dw, x, dy):
    return dw + dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def lost_ulps(tokens, dtype, device):
    """Units in the last place that float32 sums over tokens may lose beyond rounding.

    A GPU's tensor cores add 4 to 16 products of 16-bit numbers to a float32 sum at once, and cut
    off what it has no room for, always towards zero: about a unit each time at most. With 8 at
    once, sums of 2048 products near 100 err by 4e-3 at most. Rounding them to 16 bits costs 0.03
    (float16) or 0.25.
    """
    return tokens // 8 if device.type == "cuda" and dtype in HALVES else 0


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("tokens", [(5,), (3, 7), (0,), (4096 + 3,), (2, 3, 4)], ids=str)
def test_float32_sums(tokens, dtype, device):
    """Whatever the inputs' dtype, only float32's error: their products are not rounded."""
    x = torch.randn(*tokens, 6, device=device).to(dtype)
    dy = torch.randn(*tokens, 10, device=device).to(dtype)
    dw = torch.randn(10, 6, device=device)
    expected, actual = (dw, x.float(), dy.float()), dw.clone()
    assert FP32(x, dy, actual) is None
    ulps = 1 + lost_ulps(math.prod(tokens), dtype, device)
    assert_as_accurate_as(product, actual, *expected, ulps=ulps)


def test_16_bit_products_are_not_rounded(device):
    """A lossy ``dw.add_(dy.t() @ x)`` is off by bf16's rounding of sums near 100."""
    x, dy = torch.randn(2048, 32, device=device), torch.randn(2048, 16, device=device)
    x, dy = x.bfloat16(), dy.bfloat16()
    exact = dy.double().t() @ x.double()
    actual = torch.zeros(16, 32, device=device)
    FP32(x, dy, actual)
    ulp = torch.finfo(torch.float32).eps * 128  # of the largest sums
    limit = 1e-4 + lost_ulps(2048, torch.bfloat16, device) * ulp
    assert (actual - exact).abs().max() < limit
    assert ((dy.t() @ x).double() - exact).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_sums(dtype, device):
    x, dy = torch.randn(3, 7, 6, device=device), torch.randn(3, 7, 10, device=device)
    x, dy, dw = x.to(dtype), dy.to(dtype), torch.randn(10, 6, device=device).to(dtype)
    actual = dw.clone()
    assert FP16(x, dy, actual) is None
    assert_as_accurate_as(product, actual, dw, x, dy, ulps=2)  # product and sum


def test_layouts_and_modes(device):
    x, dy = torch.randn(6, 5, device=device).t(), torch.randn(5, 20, device=device)[:, ::2]
    expected = torch.ones(10, 6, device=device) + dy.t() @ x
    buffer = torch.ones(6, 10, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        FP32(x.requires_grad_(), dy, buffer.t())
    torch.testing.assert_close(buffer.t(), expected.detach())
    assert not buffer.requires_grad
    column = torch.ones(10, 12, device=device)
    FP32(x.detach(), dy, column[:, ::2])
    torch.testing.assert_close(column[:, ::2], expected.detach())
    assert torch.equal(column[:, 1::2], torch.ones(10, 6, device=device))


def has_library(device):
    """cuBLASLt or hipBLASLt; on the emulated GPU a fake of both, which ci/emulate.py compiles."""
    is_emulated = runs_gpu_kernels(device) and bool(os.environ.get("APEX_EMULATE_BLASLT"))
    return device.type == "cuda" or is_emulated


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_library(dtype, device):
    """Products of 16-bit numbers, added up in float32, by the BLAS library; where it serves."""
    x, dy = torch.randn(65, 24, device=device).to(dtype), torch.randn(65, 9, device=device)
    dy, dw = dy.to(dtype), torch.randn(9, 24, device=device)
    actual = dw.clone()
    assert add_weight_gradient(x, dy, actual) == has_library(device)
    if has_library(device):
        assert_as_accurate_as(product, actual, dw, x.float(), dy.float())
    else:
        assert torch.equal(actual, dw)
    for others in [(x, dy, dw.t().contiguous().t()), (x[:0], dy[:0], dw), (x.float(), dy, dw)]:
        assert not add_weight_gradient(*others)


def test_library_checks(device):
    if not has_library(device):
        pytest.skip("this operator is of GPUs alone")
    x, dy, dw = (torch.ones(*s, device=device).bfloat16() for s in ((5, 8), (5, 16), (16, 8)))
    with pytest.raises(RuntimeError, match="main_grad must be float32"):
        add_weight_gradient_blaslt(x, dy, dw)
    with pytest.raises(RuntimeError, match=r"main_grad must have shape \[16, 8\]"):
        add_weight_gradient_blaslt(x, dy, dw.t().float())
    checks = ("test_schema", "test_faketensor")  # compiled code never calls it
    torch.library.opcheck(add_weight_gradient_blaslt, (x, dy, dw.float()), test_utils=checks)


@pytest.mark.parametrize(
    ("function", "dtypes", "shapes", "error", "text"),
    [
        (FP32, "fff", ([5, 6], [4, 10], [10, 6]), ValueError, r"got \[5, 6\], \[4, 10\]"),
        (FP32, "fff", ([5, 6], [5, 10], [6, 10]), ValueError, r"and \[6, 10\]"),
        (FP32, "fff", ([6], [10], [10, 6]), ValueError, "expected input"),
        (FP32, "bbb", ([5, 6], [5, 10], [10, 6]), TypeError, "d_weight in float32"),
        (FP32, "ddf", ([5, 6], [5, 10], [10, 6]), TypeError, "got torch.float32 and torch.float64"),
        (FP32, "bff", ([5, 6], [5, 10], [10, 6]), TypeError, "d_output is torch.float32"),
        (FP16, "bbf", ([5, 6], [5, 10], [10, 6]), TypeError, "both in bfloat16"),
        (FP16, "bhb", ([5, 6], [5, 10], [10, 6]), TypeError, "d_output is torch.float16"),
    ],
)
def test_errors_change_nothing(function, dtypes, shapes, error, text):
    names = {"f": torch.float32, "b": torch.bfloat16, "h": torch.float16, "d": torch.float64}
    tensors = [torch.ones(s, dtype=names[d]) for s, d in zip(shapes, dtypes, strict=True)]
    with pytest.raises(error, match=text):
        function(*tensors)
    assert torch.equal(tensors[2], torch.ones_like(tensors[2]))


def test_attributes_can_be_assigned(monkeypatch):
    monkeypatch.setattr(extension, "wgrad_gemm_accum_fp32", "mine")
    assert extension.wgrad_gemm_accum_fp32 == "mine"
