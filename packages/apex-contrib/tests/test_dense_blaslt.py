"""Products with epilogues of cuBLASLt and hipBLASLt: against PyTorch in float64, and when.

On a GPU the library is torch's own. On the emulated one it is a fake with the checks that NVIDIA's
makes, see shared_csrc/tests/blaslt_fake.cpp. A CPU has none.
"""

import logging
import os

import pytest
import torch
from torch.nn import functional as F

from apex.contrib import dense_blaslt
from apex.contrib._shared.native import blaslt
from apex.fused_dense import FusedDenseGeluDense, fused_dense_function
from apex_testkit import assert_as_accurate_as
from apex_testkit.devices import runs_gpu_kernels

HALVES = torch.bfloat16, torch.float16
# Rows, features in and out. The last leading dimension of GELU's input must be a multiple of 8.
SIZES = [(5, 7, 16), (1, 1, 8), (64, 48, 40), (3, 24, 8)]


def has_library(device):
    if device.type == "cuda":
        return True
    return runs_gpu_kernels(device) and bool(os.environ.get("APEX_EMULATE_BLASLT"))


def operands(rows, columns, out, dtype, device):
    x = torch.randn(rows, columns, device=device)
    weight = torch.randn(out, columns, device=device) / columns**0.5
    bias, dy = torch.randn(out, device=device), torch.randn(rows, out, device=device)
    return [t.to(dtype) for t in (x, weight, bias, dy)]


def gelu(x):
    return F.gelu(x, approximate="tanh")


def check(actual, reference, *given, device, ulps=1.0):
    """Where there is a library it must serve, and be accurate; elsewhere it must not."""
    assert (actual is not None) == has_library(device)
    if actual is not None:
        assert_as_accurate_as(reference, actual, *given, ulps=ulps)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_forward(dtype, sizes, has_bias, device):
    x, weight, bias, _ = operands(*sizes, dtype, device)
    bias = bias if has_bias else None

    def reference(x, weight, *bias):
        gelu_in = F.linear(x, weight, *bias)
        return gelu(gelu_in), gelu_in

    given = (x, weight, bias) if has_bias else (x, weight)
    actual = dense_blaslt.dense_with_gelu(x, weight, bias)
    check(actual, reference, *given, device=device)
    if actual is not None:  # any number of dimensions
        more = dense_blaslt.dense_with_gelu(x.unsqueeze(0), weight, bias)
        assert all(torch.equal(a, m[0]) for a, m in zip(actual, more, strict=True))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradient_of_gelu(dtype, sizes, has_bias, device):
    gelu_in, _, _, dy = operands(*sizes[::2], 16, dtype, device)
    weight = operands(16, 1, sizes[2], dtype, device)[3]

    def reference(dy, weight, gelu_in):
        x = gelu_in.detach().requires_grad_()
        (dx,) = torch.autograd.grad(gelu(x), x, dy @ weight)
        return (dx, dx.sum(0)) if has_bias else (dx,)

    actual = dense_blaslt.dense_gelu_gradient(dy, weight, gelu_in, has_bias)
    actual = actual if has_bias or actual is None else actual[:1]
    check(actual, reference, dy, weight, gelu_in, device=device)


@pytest.mark.parametrize("sizes", [*SIZES, (5, 7, 9)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_weight_and_bias_gradients(dtype, sizes, device):
    x, _, _, dy = operands(*sizes, dtype, device)
    actual = dense_blaslt.weight_and_bias_gradients(dy, x)
    check(actual, lambda dy, x: (dy.t() @ x, dy.sum(0)), dy, x, device=device)


def count(monkeypatch):
    """The names of the operators that serve from now on."""
    served = []

    def counted(name, operator):
        def call(*given):
            results = operator(*given)
            assert results[-1] == 0
            served.append(name)
            return results

        return call

    for name in ("_gelu", "_gelu_backward", "_gradients"):
        monkeypatch.setattr(dense_blaslt, name, counted(name, getattr(dense_blaslt, name)))
    return served


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_layers_take_them(dtype, monkeypatch, device):
    """Forward and backward of both functions; where there is no library, the composition."""
    served = count(monkeypatch)
    monkeypatch.setattr("apex.contrib._shared.native.half_matmul._slow", ())
    layer = FusedDenseGeluDense(24, 16, 8).to(device, dtype)
    x = torch.randn(6, 24, device=device).to(dtype).requires_grad_()
    dy = torch.randn(6, 8, device=device).to(dtype)
    given = [x, *layer.parameters()]
    actual = [layer(x), *torch.autograd.grad(layer(x), given, dy)]

    def reference(dy, x, w1, b1, w2, b2):
        leaves = [t.detach().requires_grad_() for t in (x, w1, b1, w2, b2)]
        y = F.linear(gelu(F.linear(*leaves[:3])), *leaves[3:])
        return y, *torch.autograd.grad(y, leaves, dy)

    assert_as_accurate_as(reference, actual, dy, *[g.detach() for g in given], ulps=4)
    expected = ["_gelu", "_gelu", "_gradients", "_gelu_backward"]
    assert served == (expected if has_library(device) else [])
    served.clear()
    fused_dense_function(*given[:3]).backward(torch.ones(6, 16, device=device, dtype=dtype))
    assert served == (["_gradients"] if has_library(device) else [])


REFUSED = {
    "float32": lambda t: t.float(),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "empty": lambda t: t[:0],
    "a subclass": lambda t: t.as_subclass(type("Mine", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_is_left_to_torch(change, device):
    x, _, _, dy = (change(t) for t in operands(5, 8, 16, torch.bfloat16, device))
    assert dense_blaslt.weight_and_bias_gradients(dy, x) is None


def test_sizes_without_an_algorithm(device, caplog):
    """The stride of GELU's input must be a multiple of 8; this is said once, for debugging."""
    x, weight, bias, _ = operands(5, 8, 12, torch.bfloat16, device)
    blaslt.log_refusal.cache_clear()
    with caplog.at_level(logging.DEBUG, "apex"):
        for _ in range(2):
            assert dense_blaslt.dense_with_gelu(x, weight, bias) is None
    said = [r.message for r in caplog.records if "no algorithm for these sizes" in r.message]
    assert len(said) == has_library(device)


def test_compiled_code_composes(monkeypatch, device):
    served = count(monkeypatch)
    x, weight, bias, _ = operands(8, 8, 16, torch.bfloat16, device)
    torch.compiler.reset()
    both = torch.compile(fused_dense_function, fullgraph=True, backend="aot_eager")
    both(x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()).sum().backward()
    assert served == []


BACKENDS = torch._C._BlasBackend


@pytest.mark.parametrize(
    ("is_rocm", "preferred", "environment", "expected"),
    [
        (False, BACKENDS.Cublas, {}, False),  # as torch's default reads
        (False, BACKENDS.Cublaslt, {}, False),
        (False, None, {"DISABLE_ADDMM_CUDA_LT": "0"}, False),
        (False, BACKENDS.Cublaslt, {"DISABLE_ADDMM_CUDA_LT": "1"}, True),
        (True, BACKENDS.Cublaslt, {"DISABLE_ADDMM_CUDA_LT": "1"}, True),
        (True, BACKENDS.Cublaslt, {}, False),
        (True, BACKENDS.Cublas, {}, True),
        (True, None, {}, False),
    ],
)
def test_the_user_rules_it_out(is_rocm, preferred, environment, expected):
    assert blaslt.rules_out(is_rocm, preferred, environment) is expected


def test_the_environment_is_asked(monkeypatch, device):
    monkeypatch.setattr(blaslt, "_is_ruled_out", blaslt._is_ruled_out.__wrapped__)
    x, _, _, dy = operands(5, 8, 16, torch.bfloat16, device)
    assert (dense_blaslt.weight_and_bias_gradients(dy, x) is not None) == has_library(device)
    monkeypatch.setenv("DISABLE_ADDMM_CUDA_LT", "1")
    assert dense_blaslt.weight_and_bias_gradients(dy, x) is None


def test_operators_check_what_they_are_given(device):
    if not runs_gpu_kernels(device):
        pytest.skip("these operators are of GPUs alone")
    x, weight, bias, dy = operands(5, 8, 16, torch.bfloat16, device)
    forward, backward = dense_blaslt.dense_gelu_blaslt, dense_blaslt.dense_gelu_backward_blaslt
    for op, given, text in [
        (forward, (x, weight[:, :4].contiguous(), bias), r"weight must have shape \[16, 8\]"),
        (forward, (x, weight, bias[:8]), "bias must be contiguous, with 16"),
        (forward, (x[0], weight, bias), "contiguous matrices"),
        (forward, (x.double(), weight.double(), bias), "must be float32, float16 or bfloat16"),
        (forward, (x[:0], weight, bias), "x and weight must have elements"),
        (backward, (dy, weight, x[:4], True), r"gelu_in must have shape \[5, 8\]"),
        (backward, (dy, weight, x.float(), True), "gelu_in must be contiguous, with 40"),
        (dense_blaslt.dense_gradients_blaslt, (dy, x[:4]), r"x must have shape \[5, 8\]"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            op(*given)


def test_is_a_good_citizen_of_torch(device):
    if not has_library(device):
        pytest.skip("these operators are of GPUs alone")
    x, weight, bias, dy = operands(5, 8, 16, torch.bfloat16, device)
    samples = {
        dense_blaslt.dense_gelu_blaslt: (x, weight, bias),
        dense_blaslt.dense_gelu_backward_blaslt: (x, weight.t().contiguous(), dy, True),
        dense_blaslt.dense_gradients_blaslt: (dy, x),
    }
    for op, sample in samples.items():
        torch.library.opcheck(op, sample)
