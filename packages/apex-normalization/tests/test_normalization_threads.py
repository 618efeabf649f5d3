"""Sums over rows: the same bits for a thread count, and how far apart they are between counts."""

import pytest
import torch

from apex.normalization import fused_add_layer_norm
from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine, ops
from apex_testkit import assert_as_accurate_as

ROWS, COLUMNS = 5000, 48
NORMS = {
    "layer": lambda x, w, b: fused_layer_norm_affine(x, w, b, COLUMNS),
    "rms": lambda x, w, b: fused_rms_norm_affine(x, w, COLUMNS),
    "add": lambda x, w, b: fused_add_layer_norm(x, x.detach(), w, b),
}


def grads(norm, x, weight, bias, dy, threads):
    """Return dx, and dweight and dbias where there is one, of a number of threads."""
    torch.set_num_threads(threads)
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
    found = torch.autograd.grad(norm(*inputs), inputs, dy, allow_unused=True)
    return [g for g in found if g is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
def test_bits_of_a_thread_count(norm, dtype):
    """A row's own results do not depend on the number of threads; sums over rows differ by less
    than a hundredth of float32's unit times what was added up, before they are rounded."""
    x, dy = torch.randn(2, ROWS, COLUMNS, dtype=dtype)
    weight, bias = torch.randn(2, COLUMNS, dtype=dtype)
    by_threads = {}
    for threads in (1, 2, 1, 2):
        found = grads(norm, x, weight, bias, dy, threads)
        for a, e in zip(found, by_threads.setdefault(threads, found), strict=True):
            assert torch.equal(a, e)
    (dx, *one), (dx_two, *two) = by_threads[1], by_threads[2]
    assert torch.equal(dx, dx_two)
    xhat_bound = COLUMNS**0.5  # no element of a normalized row is larger
    added = dy.double().abs().sum(0) * xhat_bound
    for a, b in zip(one, two, strict=True):
        bound = BOUND[dtype] * added + a.double().abs() * torch.finfo(dtype).eps
        assert ((a.double() - b.double()).abs() <= bound).all()


# Blocks of 32 rows are added in the statistics' dtype, blocks in float64: between thread counts
# blocks begin at other rows.
BOUND = {
    torch.float32: 32 * torch.finfo(torch.float32).eps / 2,
    torch.bfloat16: 32 * torch.finfo(torch.float32).eps / 2,
    torch.float64: 32 * torch.finfo(torch.float64).eps / 2,
}


@pytest.mark.parametrize("seed", range(3))
def test_sums_over_rows_are_as_accurate_as_torchs(seed, device):
    """No unit in the last place is granted on top: rounding after every row would show."""
    torch.manual_seed(seed)
    x, dy = torch.randn(2, 300, 768, device=device)
    _, mean, rstd = ops.layer_norm_forward(x, None, None, 768, 1e-5)
    weight = torch.ones(768, device=device)
    sums = ops.layer_norm_backward(dy, x, weight, mean, rstd, 768, True)[1:]

    def reference(x, dy):
        xhat = (x - x.mean(1, keepdim=True)) / (x.var(1, False, keepdim=True) + 1e-5).sqrt()
        return (dy * xhat).sum(0), dy.sum(0)

    assert_as_accurate_as(reference, sums, x, dy, ulps=0)
