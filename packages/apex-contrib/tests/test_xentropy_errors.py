"""Bad arguments of the cross entropy are refused by name, before anything is computed."""

import importlib
import sys

import pytest
import torch
import torch.nn.functional as F

from apex.contrib import _ops
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.contrib.xentropy.ops import softmax_xentropy_backward, softmax_xentropy_forward
from apex_testkit import assert_as_accurate_as, runs_gpu_kernels

X = torch.zeros(4, 10)
Y = torch.ones(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X.int(), Y), TypeError, "logits must be a float64.*got torch.int32"),
        ((X, Y.int()), TypeError, r"labels must be int64.*labels\.long\(\)"),
        ((X[0], Y), ValueError, r"logits must have shape \[N, C\].*got \[10\]"),
        ((X[:, :0], Y), ValueError, r"with C > 0, got \[4, 0\]"),
        ((X, Y[:3]), ValueError, r"labels must have shape \[4\].*got \[3\]"),
        ((X, Y[:, None]), ValueError, r"got \[4, 1\]"),
        ((X, Y.to("meta")), ValueError, "logits are on cpu, but labels are on meta"),
        ((X, Y, 1.5), ValueError, r"smoothing must be in \[0, 1\], got 1.5"),
        ((X, Y, -0.1), ValueError, r"smoothing must be in \[0, 1\], got -0.1"),
        ((X, Y, float("nan")), ValueError, "smoothing must be in .*got nan"),
        ((X, Y, 0.0, 0, True), ValueError, "half_to_float is for float16 and bfloat16"),
        ((X.double(), Y, 0.0, 0, True), ValueError, "got torch.float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments(arguments, error, message):
    with pytest.raises(error, match=f"^SoftmaxCrossEntropyLoss: .*{message}"):
        SoftmaxCrossEntropyLoss.apply(*arguments)


@pytest.mark.parametrize("label", [10, -1, 2**40, -(2**63)])
def test_label_without_class(label, device):
    """The CPU says which label; a GPU gives NaN for its row, and reads nothing out of bounds."""
    logits = torch.zeros(4, 10, device=device, requires_grad=True)
    labels = torch.tensor([1, 0, label, label], device=device)
    if not runs_gpu_kernels(device):
        with pytest.raises(RuntimeError, match=rf"labels\[2\] is {label}, but logits has 10 class"):
            SoftmaxCrossEntropyLoss.apply(logits, labels)
        return
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels)
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    expected = torch.tensor([False, False, True, True])
    assert torch.equal(losses.isnan().cpu(), expected)
    assert torch.equal(grad.isnan().all(1).cpu(), expected)
    assert grad[:2].isfinite().all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grad_losses": torch.zeros(3)}, r"grad_losses must have shape \[4\]"),
        ({"grad_losses": torch.zeros(4).double()}, "losses must have the dtype of logits"),
        ({"maxima": torch.zeros(5)}, r"maxima must have shape \[4\]"),
        ({"sums_exp": torch.zeros(4, 1)}, r"sums_exp must have shape \[4\]"),
        ({"maxima": torch.zeros(4).double()}, "maxima must be float32, got float64"),
        ({"labels": Y[:2]}, r"labels must have shape \[4\].*\[2\] int64 on cpu"),
        ({"labels": Y.int()}, "labels must be int64"),
        ({"labels": Y + 9}, r"labels\[0\] is 10"),
        ({"logits": torch.zeros(40)}, r"logits must have shape \[N, C\]"),
        ({"logits": torch.zeros(4, 0)}, "logits has no classes"),
        ({"logits": torch.zeros(4, 10).int()}, "expected float64, float32, float16 or bfloat16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ops_check_what_would_read_foreign_memory(changed, message):
    arguments = {
        "grad_losses": torch.zeros(4),
        "logits": X,
        "maxima": torch.zeros(4),
        "sums_exp": torch.ones(4),
        "labels": Y,
        "smoothing": 0.0,
        "padding_idx": None,
    }
    with pytest.raises(RuntimeError, match=message):
        softmax_xentropy_backward(**(arguments | changed))


def test_forward_op_refuses_float32_losses_of_float64():
    with pytest.raises(RuntimeError, match="float32 for 16-bit logits; got float32 for float64"):
        softmax_xentropy_forward(X.double(), Y, 0.0, None, True)


class TestLegacyModule:
    def test_same_numbers(self):
        import xentropy_cuda

        logits = torch.randn(4, 10)
        grads = torch.randn(4)
        losses, lse = xentropy_cuda.forward(logits, Y, 0.1, False)
        actual = xentropy_cuda.backward(grads, logits, lse, Y, 0.1)
        logits.requires_grad_()
        expected = SoftmaxCrossEntropyLoss.apply(logits, Y, 0.1, None)
        assert torch.equal(losses, expected)
        assert_as_accurate_as(lambda x: torch.logsumexp(x, 1), lse, logits)
        expected_grad = lambda x, grads: torch.autograd.grad(
            F.cross_entropy(x, Y, label_smoothing=0.1, reduction="none"), x, grads
        )
        assert_as_accurate_as(expected_grad, (actual,), logits, grads, ulps=2)  # lse is rounded

    def test_absent_without_kernels(self, monkeypatch):
        """Callers ask by importing whether the kernels can run."""
        monkeypatch.setattr(_ops.library, "manifest", dict)
        monkeypatch.setattr(_ops.library, "_loaded", set())
        monkeypatch.setenv("APEX_JIT", "0")
        monkeypatch.delitem(sys.modules, "xentropy_cuda", raising=False)
        with pytest.raises(ImportError, match="because APEX_JIT=0 forbids compiling them"):
            importlib.import_module("xentropy_cuda")
