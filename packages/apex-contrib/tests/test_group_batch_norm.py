"""The operators of batch norm over groups of ranks, against formulas in float64."""

import pytest
import torch

from apex.contrib._shared.native.operands import statistics_dtype
from apex.contrib.group_batch_norm import ops
from apex_testkit import FLOATS, assert_as_accurate_as
from apex_testkit.devices import runs_gpu_kernels
from apex_testkit.grids import for_gpus
from apex_testkit.opcheck import opcheck_samples

SIZES = {  # rows, channels
    "one": (1, 1),
    "odd": (21, 5),
    "narrow": (3000, 3),
    "packs": (128, 64),
    "tail": (400, 70),
    "wide": (15, 1100),
    "long": (40_001, 2),
    **for_gpus(block=(5, 776), splits=(637, 64)),
}
GRID = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
DTYPE = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def rows(size, dtype, device, count=1):
    values = [torch.randn(size) * 2 + 1 for _ in range(count)]
    return [value.to(device=device, dtype=dtype) for value in values]


def vectors(c, dtype, device, count):
    dtype = statistics_dtype(dtype)
    return [(torch.rand(c) + 0.5).to(device=device, dtype=dtype) for _ in range(count)]


def ulps_of_sum(dtype):
    """A rounding to float32 after one per part; in float64 no wider type sums the parts."""
    return 40 if dtype == torch.float64 else 2


@DTYPE
@GRID
def test_moments(size, dtype, device):
    (x,) = rows(size, dtype, device)
    actual = ops.moments(x)
    assert [a.dtype for a in actual] == [statistics_dtype(dtype)] * 2
    reference = lambda x: (x.mean(0), x.var(0, unbiased=False))
    # Of both sums around a pivot, rounded to float32, the larger may be twice the variance.
    assert_as_accurate_as(reference, actual, x, ulps=2 * ulps_of_sum(dtype))


@DTYPE
@GRID
def test_statistics(size, dtype, device):
    (x,) = rows(size, dtype, device)
    running = vectors(size[1], dtype, device, 2)

    def reference(x, *running):
        mean, biased, n = x.mean(0), x.var(0, unbiased=False), max(len(x) - 1, 1)
        var = biased * len(x) / n
        updated = [old.lerp(new, 0.3) for old, new in zip(running, (mean, var), strict=True)]
        return mean, var, (biased + 1e-3).rsqrt(), *updated

    given = [*(v.clone() for v in running), torch.tensor(6, device=device)]
    *actual, count = ops.statistics(x, *given, 1e-3, 0.3)
    assert count.tolist() == [len(x)]
    assert [v._version for v in given] == [1, 1, 1]
    assert given.pop() == 7
    assert_as_accurate_as(reference, (*actual, *given), x, *running, ulps=2 * ulps_of_sum(dtype))
    again = ops.statistics(x, None, None, None, 1e-3, 0.3)
    assert all(map(torch.equal, again, (*actual, count)))


@pytest.mark.parametrize("count", [300, 2000])
def test_merging_costs_no_digits(count, device):
    """What threads and splits have of a column: merged in float32, an ulp of variance was lost."""
    x = torch.randn(count, 64) * 2 + 8
    wanted = x.double().var(0, unbiased=False)
    errors = (ops.moments(x.to(device))[1].cpu() - wanted) / 2.0 ** wanted.log2().floor()
    assert errors.square().mean().sqrt() < 0.7 * torch.finfo(torch.float32).eps


def test_moments_of_far_rows(device):
    """A mean of 1e4 standard deviations, and a row of zeros at the border of an image."""
    x = torch.randn(500, 70, device=device) + 1e4
    for offset in (x, torch.cat([x, torch.zeros_like(x[:1])]), torch.full_like(x, 3e4)):
        reference = lambda x: (x.mean(0), x.var(0, unbiased=False))
        # Of 300 random inputs the worst is off by 4.5 ulp.
        assert_as_accurate_as(reference, ops.moments(offset), offset, ulps=6)
    assert ops.moments(torch.full_like(x, 0.1))[1].max() < 1e-12
    assert all(v.isnan().any() for v in ops.moments(torch.where(x == x.max(), torch.nan, x)))
    empty = ops.moments(x[:0])
    assert not torch.stack(empty).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_merge(dtype, device):
    parts = [torch.randn(n, 7, dtype=dtype, device=device) + n for n in (1, 30, 4)]
    count = torch.tensor([1, 30, 0, 4], device=device)
    mean, var = (torch.stack(v) for v in zip(*map(ops.moments, parts), strict=True))
    mean, var = (torch.cat([v[:2], torch.zeros_like(v[:1]), v[2:]]) for v in (mean, var))
    reference = lambda x: (x.mean(0), x.var(0), (x.var(0, unbiased=False) + 1e-3).rsqrt())
    actual = ops.merge(mean, var, count, 1e-3)
    assert_as_accurate_as(reference, actual, torch.cat(parts), ulps=ulps_of_sum(dtype))


def test_merge_of_many(device):
    """A GPU merges them in more than eight splits."""
    x = torch.randn(1185, 4, 7, device=device)
    mean, var = x.mean(1), x.var(1, unbiased=False)
    count = torch.full((1185,), 4, device=device)
    reference = lambda x: (x.mean(0), x.var(0), (x.var(0, unbiased=False) + 1e-3).rsqrt())
    actual = ops.merge(mean, var, count, 1e-3)
    assert_as_accurate_as(reference, actual, x.flatten(0, 1), ulps=ulps_of_sum(torch.float32))


@DTYPE
@GRID
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("with_z", [False, True], ids=["", "z"])
def test_forward(with_z, relu, size, dtype, device):
    x, z = rows(size, dtype, device, 2)
    given = vectors(size[1], dtype, device, 4)
    z = z if with_z else None

    def reference(x, z, mean, inv_std, weight, bias):
        p = (x - mean) * inv_std * weight + bias + (0 if z is None else z)
        return p.relu() if relu else p

    actual = ops.forward(x, z, *given, relu)
    assert actual.dtype == dtype
    assert_as_accurate_as(reference, actual, x, z, *given)


@DTYPE
@GRID
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
def test_sums(relu, size, dtype, device):
    dy, x, y = rows(size, dtype, device, 3)
    y = y.relu() if relu else None
    mean, inv_std = vectors(size[1], dtype, device, 2)

    def reference(dy, x, mean, inv_std):
        dy = dy if y is None else torch.where(y <= 0, 0, dy)
        sum_dy_xmu = (dy * (x - mean)).sum(0)
        return dy.sum(0), sum_dy_xmu, sum_dy_xmu * inv_std

    masked, *actual = ops.sums(dy, x, y, mean, inv_std)
    assert_as_accurate_as(reference, actual, dy, x, mean, inv_std, ulps=ulps_of_sum(dtype))
    assert torch.equal(masked, torch.where(y <= 0, 0, dy) if relu else dy.new_empty(0))


@DTYPE
@GRID
def test_backward(size, dtype, device):
    dy, x = rows(size, dtype, device, 2)
    given = vectors(size[1], dtype, device, 5)
    count = torch.tensor([size[0] * 2], device=device)

    def reference(dy, x, mean, inv_std, weight, sum_dy, sum_dy_xmu, count):
        slope = inv_std**2 * sum_dy_xmu / count
        return (dy - sum_dy / count - (x - mean) * slope) * weight * inv_std

    actual = ops.backward(dy, x, *given, count)
    assert actual.dtype == dtype
    assert_as_accurate_as(reference, actual, dy, x, *given, count)


@DTYPE
@GRID
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
def test_gradients(relu, size, dtype, device):
    dy, x, y = rows(size, dtype, device, 3)
    y = y.relu() if relu else None
    given = vectors(size[1], dtype, device, 3)

    def reference(dy, x, mean, inv_std, weight):
        dy = dy if y is None else torch.where(y <= 0, 0, dy)
        sum_dy, sum_dy_xmu = dy.sum(0), (dy * (x - mean)).sum(0)
        slope = inv_std**2 * sum_dy_xmu / len(x)
        dx = (dy - sum_dy / len(x) - (x - mean) * slope) * weight * inv_std
        return dx, sum_dy, sum_dy_xmu * inv_std

    count = torch.tensor([len(x)], device=device)
    masked, *actual = ops.gradients(dy, x, y, *given, count)
    assert_as_accurate_as(reference, actual, dy, x, *given, ulps=ulps_of_sum(dtype))
    assert torch.equal(masked, torch.where(y <= 0, 0, dy) if relu else dy.new_empty(0))


@DTYPE
def test_opcheck(dtype, device):
    dy, x, z = rows((6, 3), dtype, device, 3)
    mean, inv_std, weight, bias, sums = vectors(3, dtype, device, 5)
    count = torch.tensor([10], device=device)
    opcheck_samples(ops.moments, [(x,)])
    for running in ((None, None, None), (mean.clone(), inv_std.clone(), count[0])):
        opcheck_samples(ops.statistics, [(x, *running, 1e-5, 0.1)])
    opcheck_samples(ops.merge, [(mean[None], weight[None], count, 1e-5)])
    forward = [(x, added, mean, inv_std, weight, bias, True) for added in (None, z)]
    opcheck_samples(ops.forward, forward)
    opcheck_samples(ops.sums, [(dy, x, y, mean, inv_std) for y in (None, z)])
    opcheck_samples(ops.backward, [(dy, x, mean, inv_std, weight, sums, sums, count)])
    opcheck_samples(ops.gradients, [(dy, x, y, mean, inv_std, weight, count) for y in (None, z)])


def test_ops_refuse_what_would_be_unsafe(device):
    (x,) = rows((6, 3), torch.float32, device)
    v, count = torch.ones(3, device=device), torch.ones(1, dtype=torch.int64, device=device)
    for text, call in {
        "x must be contiguous rows": lambda: ops.moments(x.t()),
        "expected float64, float32, float16 or bfloat16": lambda: ops.moments(x.int()),
        "mean must be": lambda: ops.forward(x, None, v[:2], v, v, v, False),
        "weight must be": lambda: ops.forward(x, None, v, v, v.half(), v, False),
        "z must be": lambda: ops.forward(x, x.half(), v, v, v, v, False),
        "dy must be": lambda: ops.sums(x[:1], x, None, v, v),
        "y must be": lambda: ops.sums(x, x, x[:1], v, v),
        "count must be": lambda: ops.backward(x, x, v, v, v, v, v, count.int()),
        "dy must be contiguous, with 18 elements of float32 in shape": lambda: ops.sums(
            x.view(3, 6), x, None, v, v
        ),
        "inv_std must be": lambda: ops.sums(x, x, None, v, v[:2]),
        "running_mean must be": lambda: ops.statistics(x, v[:2].clone(), v, None, 1e-5, 0.1),
        "running_var must be": lambda: ops.statistics(x, v.clone(), v.half(), None, 1e-5, 0.1),
        "running_var, which is written to, shares memory with x": lambda: ops.statistics(
            x, v, x[0], None, 1e-5, 0.1
        ),
        "running_mean, which is written to, shares memory with running_var": (
            lambda: ops.statistics(x, v, v, None, 1e-5, 0.1)
        ),
        "biased_var must be": lambda: ops.merge(v[None], v[:1], count, 1e-5),
        "mean must be float32 or float64": lambda: ops.merge(v[None].half(), v[None], count, 1e-5),
    }.items():
        with pytest.raises(RuntimeError, match=text):
            call()
    if runs_gpu_kernels(device):
        return  # the host would have to wait for the counts
    with pytest.raises(RuntimeError, match=r"count\[0\] must not be negative, got -1"):
        ops.merge(v[None], v[None], -count, 1e-5)
    with pytest.raises(RuntimeError, match=r"backward: count\[0\] must not be"):
        ops.backward(x, x, v, v, v, v, v, -count)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_module_follows_autocast(training):
    from apex.contrib.cudnn_gbn import GroupBatchNorm2d

    norm, x = GroupBatchNorm2d(4, group_size=1).train(training), torch.randn(2, 4, 3, 3)
    expected = norm(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
        assert norm.double()(x.double()).dtype == torch.float64
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected)
