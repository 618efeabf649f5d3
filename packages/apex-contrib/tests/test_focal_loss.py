"""focal_loss against float64 PyTorch, over dtypes, shapes and options, and what torch asks."""

import importlib
import sys

import pytest
import torch
from torch.nn import functional as F

from apex.contrib.focal_loss import decompositions, ops
from apex.contrib.focal_loss.focal_loss import FocalLoss, focal_loss
from apex_testkit import (
    FLOATS,
    LAYOUTS,
    SHAPES,
    assert_as_accurate_as,
    assert_same_bits,
    opcheck_samples,
)
from apex_testkit.devices import runs_gpu_kernels
from apex_testkit.formulas import CHECKS, Case, check_sharded


def elements(x, targets, classes, alpha, gamma, smoothing):
    """Loss of every element, from the paper's formula."""
    columns = torch.arange(x.shape[-1], device=x.device)
    right = columns == targets[..., None]
    t = right.to(x.dtype) * (1 - smoothing) + smoothing / 2
    read = (columns < classes) & (targets != -2)[..., None]
    x = torch.where(read, x, 0)
    bce = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    p = torch.where(right, x.sigmoid(), (-x).sigmoid())
    weight = torch.where(right, torch.full_like(x, alpha), torch.full_like(x, 1 - alpha))
    return torch.where(read, weight * (1 - p) ** gamma * bce, 0)


def oracle(x, targets, positives, classes, alpha=0.25, gamma=2.0, smoothing=0.0):
    x = x if x.dtype == torch.float64 else x.float()
    return elements(x, targets, classes, alpha, gamma, smoothing).sum() / positives


def rows_of(x, targets, classes=4, alpha=0.25, gamma=1.5, smoothing=0.1):
    """What one row gives, of the op that the function sums up."""
    from apex.contrib.focal_loss.focal_loss import _focal

    return _focal(x, targets, classes, alpha, gamma, smoothing)


def arguments(dtype, device):
    x = torch.randn(4, 5, device=device, dtype=dtype)
    return x, torch.tensor([3, -1, -2, 0], device=device)


def wide(dtype, device, columns):
    x = torch.randn(4, columns, device=device, dtype=dtype)
    return x, torch.tensor([3, -1, -2, 0], device=device), columns - 1


def rows_oracle(x, targets):
    x = x if x.dtype == torch.float64 else x.float()
    return elements(x, targets, 4, 0.25, 1.5, 0.1).sum(-1)


CASE = Case(
    rows_of,
    arguments,
    rows_oracle,
    grads=(0,),
    rows=(0, 1),
    operators=(ops.focal_loss_forward, ops.focal_loss_backward),
    decompositions=decompositions,
    ulps=4,
    wide=wide,
)


def with_gradient(function, x, *given):
    x = x.detach().requires_grad_()
    loss = function(x, *given)
    return loss.detach(), torch.autograd.grad(loss, x, torch.full_like(loss, 1.5))[0]


OPTIONS = {
    "usual": (0.25, 2.0, 0.0),
    "smoothed": (0.25, 2.0, 0.1),
    "gamma": (0.75, 1.3, 0.2),
    "cross entropy": (0.5, 0.0, 0.0),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_the_oracle(dtype, shape, options, device):
    rows, columns = shape
    x = torch.randn(rows, columns, device=device, dtype=dtype) * 4
    classes = max(columns - 3, min(columns, 1))
    targets = torch.randint(-3, classes, (rows,), device=device)
    actual = with_gradient(focal_loss, x, targets, 7.0, classes, *options)
    reference = lambda x: with_gradient(oracle, x, targets, 7.0, classes, *options)
    ulps = 4.0 + rows**0.5 if dtype == torch.float64 else 1.0
    assert_as_accurate_as(reference, actual, x, ulps=ulps)
    assert not actual[1][:, classes:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_dimensions(layout, device):
    x = LAYOUTS[layout](torch.randn(3, 8, 20, device=device))
    targets = LAYOUTS[layout](torch.randint(-2, 20, (3, 8), device=device))
    positives = torch.tensor(3.0, device=device)
    actual = with_gradient(focal_loss, x, targets, positives, 20, 0.25, 2.0)
    reference = lambda x: with_gradient(oracle, x, targets, positives, 20)
    assert_as_accurate_as(reference, actual, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_large_logits(dtype, device):
    """Neither overflow nor a gradient that vanishes where the loss is linear."""
    x = torch.tensor([[90.0, -90, 1000, -1000, 0], [-90, 90, -1000, 1000, 0]], device=device)
    targets = torch.tensor([0, 2], device=device)
    for options in OPTIONS.values():
        actual = with_gradient(focal_loss, x.to(dtype), targets, 1.0, 5, *options)
        expected = with_gradient(oracle, x.double(), targets, 1.0, 5, *options)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.double(), e, rtol=1e-6, atol=1e-12)


def test_what_is_not_read(device):
    """Ignored rows and padding columns may hold anything."""
    x = torch.randn(3, 6, device=device)
    targets = torch.tensor([1, -2, -1], device=device)
    expected = with_gradient(focal_loss, x, targets, 1.0, 4, 0.25, 2.0)
    x[1], x[:, 4:] = torch.nan, torch.inf
    actual = with_gradient(focal_loss, x, targets, 1.0, 4, 0.25, 2.0)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert not actual[1][1].any()
    assert actual[1][2, :4].all()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 4)], ids=str)
def test_empty(shape, device):
    x = torch.ones(shape, device=device)
    targets = torch.full(shape[:-1], -1, device=device)
    loss, gradient = with_gradient(focal_loss, x, targets, 1.0, shape[-1], 0.25, 2.0)
    assert loss == 0
    assert gradient.shape == shape


def test_same_bits(device):
    x, targets = torch.randn(5000, 17, device=device), torch.randint(-2, 17, (5000,), device=device)
    assert_same_bits(lambda: with_gradient(rows_of, x, targets.to(device), 17)[:2])


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_formula(check, device):
    """Compiled code, derivatives, transforms, vmap, export, tracing, autocast."""
    check(CASE, device)


def on_ranks(rank, world_size):
    check_sharded(CASE, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def test_derivatives_of_the_function(device):
    x, targets = arguments(torch.float64, device)
    positives = torch.tensor(2.0, dtype=torch.float64, device=device, requires_grad=True)
    x.requires_grad_()
    of = lambda x, positives: focal_loss(x, targets, positives, 4, 0.25, 2.0, 0.1)
    assert torch.autograd.gradcheck(of, (x, positives))
    assert torch.autograd.gradgradcheck(of, (x, positives))
    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, positives), of(x, positives))


def test_is_a_good_citizen_of_torch(device):
    x, targets = arguments(torch.float32, device)
    samples = [(x, targets, 4, 0.25, 2.0, 0.1), (x[:0], targets[:0], 5, 0.25, 1.5, 0.0)]
    opcheck_samples(ops.focal_loss_forward, samples)
    grads = [torch.ones(1, device=device).expand(4), torch.ones(0, device=device)]
    opcheck_samples(ops.focal_loss_backward, [(g, *s) for g, s in zip(grads, samples, strict=True)])


def test_targets_that_are_no_class(device):
    """A CPU says which; a GPU gives NaN in that row, and reads and writes nothing else."""
    x, targets = arguments(torch.float32, device)
    targets[1] = 4
    if not runs_gpu_kernels(device):
        with pytest.raises(RuntimeError, match=r"targets\[1\] is 4, but 4 classes are real"):
            focal_loss(x, targets, 1.0, 4, 0.25, 2.0)
        return
    losses, gradient = with_gradient(rows_of, x, targets)
    assert losses.isnan().tolist() == [False, True, False, False]
    assert gradient[1, :4].isnan().all()
    assert gradient[[0, 2, 3]].isfinite().all()


def test_class_of_apex(device):
    x, targets = arguments(torch.float32, device)
    expected = focal_loss(x, targets, 2.0, 5, 0.25, 2.0, 0.1)
    assert torch.equal(FocalLoss.apply(x, targets, 2.0, 5, 0.25, 2.0, 0.1), expected)
    assert torch.equal(FocalLoss.forward(None, x, targets, 2.0, 5, 0.25, 2.0, 0.1), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extension_module_of_apex(dtype, device):
    import focal_loss_cuda as legacy

    x = torch.randn(2, 3, 8, device=device, dtype=dtype)
    targets = torch.tensor([[1, -1, -2], [0, 7, 3]], device=device)
    positives = torch.tensor([4.0], device=device)
    options = (8, 0.25, 2.0, 0.1)
    loss, partial = legacy.forward(x, targets, positives, *options)
    expected = with_gradient(oracle, x.double(), targets, positives, *options)
    unit = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), expected[0].double(), rtol=unit, atol=unit)
    assert partial.dtype == dtype
    back = legacy.backward(torch.tensor(1.5, device=device), partial, positives)
    assert back is partial
    torch.testing.assert_close(back.double(), expected[1], rtol=unit, atol=unit)


X, T = torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)
NUMBERS = (6, 0.25, 2.0)
BAD = {
    "integers": (TypeError, "cls_output must be a float64", (X.int(), T, 1.0, *NUMBERS)),
    "targets": (TypeError, "at_level must be an int64", (X, T.int(), 1.0, *NUMBERS)),
    "shape": (ValueError, r"must have shape \[4\], one number", (X, T[:3], 1.0, *NUMBERS)),
    "positives": (ValueError, "num_positive_sum must be one number", (X, T, X, *NUMBERS)),
    "classes": (ValueError, "num_real_classes must be 0 to 6", (X, T, 1.0, 7, 0.25, 2.0)),
    "gamma": (ValueError, "gamma must not be negative, got -1", (X, T, 1.0, 6, 0.25, -1.0)),
    "smoothing": (ValueError, r"smoothing must be in \[0, 1\]", (X, T, 1.0, *NUMBERS, 1.1)),
    "devices": (ValueError, "on meta, but cls_output on cpu", (X, T.to("meta"), 1.0, *NUMBERS)),
}


@pytest.mark.parametrize(("error", "text", "given"), BAD.values(), ids=BAD.keys())
def test_bad_input(error, text, given):
    with pytest.raises(error, match=f"focal_loss: .*{text}"):
        focal_loss(*given)


def test_kernels_check_what_python_did_not():
    for given, text in [
        ((X.t(), T, 4), "x must be contiguous"),
        ((X, T[:3], 6), "targets must be contiguous, with 4 elements"),
        ((X, T.int(), 6), "targets must be contiguous, with 4 elements of int64"),
        ((X, T, 7), "classes must be 0 to 6, the columns of x, got 7"),
        ((X.long(), T, 6), "got int64"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            ops.focal_loss_forward(*given, 0.25, 2.0, 0.0)
    with pytest.raises(RuntimeError, match="gamma must not be negative"):
        ops.focal_loss_forward(X, T, 6, 0.25, -2.0, 0.0)
    with pytest.raises(RuntimeError, match="grad_losses must have 4 elements of float32"):
        ops.focal_loss_backward(X[0, :3], X, T, 6, 0.25, 2.0, 0.0)


def test_import_error_where_kernels_cannot_run(monkeypatch):
    """So that `try: import ...; except ImportError:` of other projects finds its fallback."""
    from apex.contrib._ops import library

    monkeypatch.setattr(library, "manifest", dict)
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.setenv("APEX_JIT", "0")
    monkeypatch.delitem(sys.modules, "focal_loss_cuda", raising=False)
    with pytest.raises(ImportError, match=r"neither prebuilt .* APEX_JIT=0"):
        importlib.import_module("focal_loss_cuda")


def test_the_package_has_the_module_under_the_functions_name():
    """Scripts import it from the package, and call ``focal_loss.FocalLoss.apply``."""
    import apex.contrib.focal_loss as package

    assert package.focal_loss is sys.modules["apex.contrib.focal_loss.focal_loss"]
    assert package.focal_loss.FocalLoss is FocalLoss
