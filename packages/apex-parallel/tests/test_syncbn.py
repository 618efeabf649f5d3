"""The operators of SyncBatchNorm, and its autograd function and module in one process."""

import pytest
import torch

from apex.parallel import syncbn
from apex.parallel.syncbn.ops import batchnorm_gradients
from apex_testkit.accuracy import assert_as_accurate_as
from apex_testkit.grids import FLOATS, for_gpus
from apex_testkit.opcheck import opcheck_samples

# [N, C, elements], walked as rows of elements, or as [N * elements, C]
SIZES = {
    "one": (1, 1, 1),
    "odd": (3, 5, 7),
    "packs": (2, 64, 64),
    "tail": (3, 70, 131),
    "halves": (2, 40, 150),  # of a column's rows: a GPU sums 128 to 255 in a block
    "tall": (1185, 3, 5),
    "wide": (5, 1100, 3),
    "long": (2, 3, 20_001),
    **for_gpus(block=(3, 2, 776), channels=(2, 776, 3), splits=(13, 64, 49), parts=(24, 9, 30)),
}
LAYOUTS = pytest.mark.parametrize("last", [False, True], ids=["channel_first", "channel_last"])
GRID = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
DTYPE = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def inputs(size, dtype, last, device, count=1, scale=2.0, offset=1.0):
    n, c, elements = size
    shape = (n, elements, c) if last else (n, c, elements)
    values = [torch.randn(shape) * scale + offset for _ in range(count)]
    return [value.to(device=device, dtype=dtype) for value in values]


def vectors(c, dtype, device, count):
    """Statistics: in float64 for float64, else float32; positive, as inv_std is."""
    dtype = syncbn.statistics_dtype(dtype)
    return [(torch.rand(c) + 0.5).to(device=device, dtype=dtype) for _ in range(count)]


def axes(x, last):
    return [d for d in range(x.dim()) if d != (x.dim() - 1 if last else 1)]


def wide(v, x, last):
    return v if last else v.view(-1, *[1] * (x.dim() - 2))


def ulps_of_sum(dtype):
    """A rounding to float32 after one per part; in float64 no wider type sums the parts."""
    return 40 if dtype == torch.float64 else 2


@LAYOUTS
@DTYPE
@GRID
def test_welford_mean_var(size, dtype, last, device):
    (x,) = inputs(size, dtype, last, device)

    def reference(x):
        return x.mean(axes(x, last)), x.var(axes(x, last), unbiased=False)

    actual = syncbn.welford_mean_var(x, last)
    assert actual[0].dtype == syncbn.statistics_dtype(dtype)
    assert_as_accurate_as(reference, actual, x, ulps=ulps_of_sum(dtype))


@LAYOUTS
def test_offset_does_not_cancel(last, device):
    """E[x^2] - E[x]^2 would lose every digit of the variance."""
    (x,) = inputs((8, 4, 256), torch.float32, last, device, scale=1.0, offset=1e4)
    truth = x.double().var(axes(x, last), unbiased=False)
    var = syncbn.welford_mean_var(x, last)[1]
    assert ((var - truth) / truth).abs().max() < 1e-3  # x itself is rounded to 1e-3


def test_long_columns(device):
    """More rows than one set of sums takes, and a row that fills no group."""
    x = torch.randn(2 * 16_384 + 3, 512, device=device).bfloat16()
    mean = x[0].float()
    wide = x.double()
    var, truth = torch.var_mean(wide, 0, unbiased=False)
    sums = syncbn.reduce_bn(x, x, mean, torch.ones_like(mean), True)
    actual = [*syncbn.welford_mean_var(x, True), *sums[:2]]
    wanted = [truth, var, wide.sum(0), (wide * (wide - mean)).sum(0)]
    # A mean or sum near zero is as exact as what was added: 4 roundings of the root mean square.
    limit = 4 * torch.finfo(torch.float32).eps
    scales = [1.0, 1.0, len(x) ** 0.5, len(x) * (1.0 + mean.abs().max().item())]
    for a, b, scale in zip(actual, wanted, scales, strict=True):
        assert (a - b).abs().max() < limit * max(scale, b.abs().max().item())


@pytest.mark.parametrize("size", [(300, 64), (8000, 8)], ids=str)
def test_merging_costs_no_digits(size, device):
    """What threads and splits have of a column: merged in float32, 0.66 and 0.54 ulps were lost."""
    dy, x = torch.randn(size) + 3, torch.randn(size) * 2 + 8
    wide = x.double()
    truth = dy.double().sum(0), (dy * wide).sum(0), wide.mean(0), wide.var(0, unbiased=False)
    dy, x = dy.to(device), x.to(device)
    sums = syncbn.reduce_bn(dy, x, torch.zeros_like(x[0]), torch.ones_like(x[0]), True)[:2]
    errors = [
        (actual.cpu() - wanted) / 2.0 ** wanted.log2().floor()
        for actual, wanted in zip((*sums, *syncbn.welford_mean_var(x, True)), truth, strict=True)
    ]
    assert torch.stack(errors).square().mean().sqrt() < 0.53 * torch.finfo(torch.float32).eps


@LAYOUTS
def test_empty_input(last, device):
    (x,) = inputs((0, 4, 3), torch.float32, last, device)
    mean, var = syncbn.welford_mean_var(x, last)
    assert mean.tolist() == var.tolist() == [0.0] * 4
    one = torch.ones(4, device=device)
    assert syncbn.batchnorm_forward(x, x, mean, one, one, one, last, True).shape == x.shape
    assert [s.tolist() for s in syncbn.reduce_bn(x, x, mean, one, last)] == [[0.0] * 4] * 3
    *statistics, count = syncbn.batch_statistics(x, None, None, None, 0.25, 0.1, last)
    assert [s.tolist() for s in statistics] == [[0.0] * 4, [0.0] * 4, [2.0] * 4]
    assert count.tolist() == [0]


@LAYOUTS
@DTYPE
@GRID
def test_batch_statistics(size, dtype, last, device):
    (x,) = inputs(size, dtype, last, device)
    running_mean, running_var = (v.abs() for v in vectors(size[1], dtype, device, 2))

    def reference(x, running_mean, running_var):
        mean, n = x.mean(axes(x, last)), size[0] * size[2]
        biased = x.var(axes(x, last), unbiased=False)
        var = biased * n / max(n - 1, 1)
        inv_std = torch.rsqrt(biased + 1e-3)
        running = running_mean.lerp(mean, 0.3), running_var.lerp(var, 0.3)
        return mean, var, inv_std, *running

    given = running_mean.clone(), running_var.clone(), torch.tensor(6, device=device)
    *actual, count = syncbn.batch_statistics(x, *given, 1e-3, 0.3, last)
    assert count.tolist() == [size[0] * size[2]]
    assert [v._version for v in given] == [1, 1, 1]
    assert given[2] == 7
    operands = x, running_mean, running_var
    ulps = ulps_of_sum(dtype)
    assert_as_accurate_as(reference, (*actual, *given[:2]), *operands, ulps=ulps)
    again = syncbn.batch_statistics(x, None, None, None, 1e-3, 0.3, last)
    assert all(map(torch.equal, again[:3], actual))


@LAYOUTS
def test_batch_statistics_update_each_of_the_running_ones(last, device):
    (x,) = inputs((2, 3, 4), torch.float32, last, device)
    old = torch.full((3,), 7.0, device=device)
    mean, var = old.clone(), old.clone()
    new = syncbn.batch_statistics(x, mean, None, None, 1e-3, 1.0, last)
    assert torch.equal(mean, new[0])
    syncbn.batch_statistics(x, None, var, None, 1e-3, 1.0, last)
    assert torch.equal(var, new[1])
    with pytest.raises(RuntimeError, match="running_var must be contiguous, with 3 elements"):
        syncbn.batch_statistics(x, old, var[:2], None, 1e-3, 0.5, last)
    with pytest.raises(
        RuntimeError, match="num_batches must be contiguous, with 1 elements of int64"
    ):
        syncbn.batch_statistics(x, old, var, old[0], 1e-3, 0.5, last)
    number = old.view(torch.int32)[:2].view(torch.int64)
    with pytest.raises(
        RuntimeError, match=r"num_batches, which .* shares memory with running_mean"
    ):
        syncbn.batch_statistics(x, old, var, number, 1e-3, 0.5, last)
    assert old.tolist() == [7.0] * 3  # nothing is written before all is checked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_welford_parallel(dtype, device):
    counts = [4, 0, 1, 7]
    parts = [torch.randn(n, 3, dtype=dtype, device=device) + 2.0 for n in counts]
    mean = torch.stack([p.mean(0) if len(p) else p.new_zeros(3) for p in parts])
    var = torch.stack([p.var(0, unbiased=False) if len(p) else p.new_zeros(3) for p in parts])

    def reference(*parts):
        x = torch.cat(parts)
        return x.mean(0), x.var(0), 1 / torch.sqrt(x.var(0, unbiased=False) + 1e-3)

    actual = syncbn.welford_parallel(mean, var, torch.tensor(counts, device=device), 1e-3)
    assert_as_accurate_as(reference, actual, *parts, ulps=4)  # the parts' statistics are rounded


def test_counts_beyond_float32(device):
    """2**24 + 1 elements and one more: unbiased variance and mean tell them from 2**24."""
    mean = torch.tensor([[0.0], [1.0]], dtype=torch.float64, device=device)
    counts = torch.tensor([2**24 + 1, 1], device=device)
    total, var, _ = syncbn.welford_parallel(mean, torch.ones_like(mean), counts, 0.0)
    n = 2**24 + 2
    assert total.item() == 1 / n
    assert var.item() == pytest.approx((n + (n - 1) / n) / (n - 1), rel=1e-14)
    single = syncbn.welford_parallel(mean[:1], mean[:1], torch.tensor([1], device=device), 0.25)
    assert [v.item() for v in single] == [0.0, 0.0, 2.0]


def normalized(x, z, mean, inv_std, weight, bias, last, relu):
    mean, inv_std, weight, bias = (wide(v, x, last) for v in (mean, inv_std, weight, bias))
    y = (x - mean) * inv_std * weight + bias
    y = y if z is None else y + z
    return y.relu() if relu else y


@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("with_z", [False, True], ids=["", "z"])
@LAYOUTS
@DTYPE
@GRID
def test_batchnorm_forward(size, dtype, last, with_z, relu, device):
    x, z = inputs(size, dtype, last, device, 2)
    z = z if with_z else None
    arguments = (x, z, *vectors(size[1], dtype, device, 4), last, relu)
    actual = syncbn.batchnorm_forward(*arguments)
    assert actual.dtype == dtype
    assert_as_accurate_as(normalized, actual, *arguments)


@pytest.mark.parametrize("with_z", [False, True], ids=["", "z"])
@LAYOUTS
@DTYPE
def test_relu_bw(dtype, last, with_z, device):
    """Values of a coarse grid, so that the sign of the sum is exact in every precision."""
    dy, x, z = inputs(SIZES["tail"], dtype, last, device, 3, offset=0.0)
    x, z = x.round(), z.round() if with_z else None
    stats = vectors(SIZES["tail"][1], dtype, device, 4)
    for vector, value in zip(stats, (1.0, 0.5, 0.5, 1.0), strict=True):
        vector.fill_(value)
    p = normalized(x.double(), None if z is None else z.double(), *stats, last, False)
    assert (p == 0).any()
    actual = syncbn.relu_bw(dy, x, z, *stats, last)
    assert torch.equal(actual, torch.where(p <= 0, 0, dy))


@LAYOUTS
@DTYPE
@GRID
def test_reduce_bn(size, dtype, last, device):
    dy, x = inputs(size, dtype, last, device, 2)
    mean, inv_std = vectors(size[1], dtype, device, 2)

    def reference(dy, x, mean, inv_std):
        sum_dy_xmu = (dy * (x - wide(mean, x, last))).sum(axes(x, last))
        return dy.sum(axes(x, last)), sum_dy_xmu, sum_dy_xmu * inv_std

    actual = syncbn.reduce_bn(dy, x, mean, inv_std, last)
    assert_as_accurate_as(reference, actual, dy, x, mean, inv_std, ulps=ulps_of_sum(dtype))


@LAYOUTS
@DTYPE
@GRID
def test_batchnorm_backward(size, dtype, last, device):
    dy, x = inputs(size, dtype, last, device, 2)
    stats = vectors(size[1], dtype, device, 5)
    count = torch.tensor([size[0] * size[2]], device=device)

    def reference(dy, x, mean, inv_std, weight, sum_dy, sum_dy_xmu, count):
        mean, inv_std, weight, sum_dy, sum_dy_xmu = (
            wide(v, x, last) for v in (mean, inv_std, weight, sum_dy, sum_dy_xmu)
        )
        slope = inv_std**2 * sum_dy_xmu / count
        return (dy - sum_dy / count - (x - mean) * slope) * weight * inv_std

    actual = syncbn.batchnorm_backward(dy, x, *stats, count, last)
    assert actual.dtype == dtype
    assert_as_accurate_as(reference, actual, dy, x, *stats, count)


@LAYOUTS
@DTYPE
@GRID
def test_batchnorm_gradients(size, dtype, last, device):
    dy, x = inputs(size, dtype, last, device, 2)
    stats, n = vectors(size[1], dtype, device, 3), size[0] * size[2]

    def reference(dy, x, mean, inv_std, weight):
        centered = x - wide(mean, x, last)
        sum_dy, sum_dy_xmu = dy.sum(axes(x, last)), (dy * centered).sum(axes(x, last))
        shift, slope = wide(sum_dy / n, x, last), wide(inv_std**2 * sum_dy_xmu / n, x, last)
        dx = (dy - shift - centered * slope) * wide(weight * inv_std, x, last)
        return dx, sum_dy, sum_dy_xmu * inv_std

    count = torch.tensor([n], device=device)
    actual = batchnorm_gradients(dy, x, *stats, count, last)
    assert_as_accurate_as(reference, actual, dy, x, *stats, ulps=ulps_of_sum(dtype))


@LAYOUTS
@DTYPE
def test_opcheck(dtype, last, device):
    dy, x, z = inputs((2, 3, 5), dtype, last, device, 3)
    mean, inv_std, weight, bias, sums = vectors(3, dtype, device, 5)
    count = torch.tensor([10], device=device)
    opcheck_samples(syncbn.welford_mean_var, [(x, last)])
    opcheck_samples(syncbn.welford_parallel, [(mean[None], weight[None], count, 1e-5)])
    forward = [(x, added, mean, inv_std, weight, bias, last, True) for added in (None, z)]
    opcheck_samples(syncbn.batchnorm_forward, forward)
    opcheck_samples(syncbn.relu_bw, [(dy, *arguments[:-1]) for arguments in forward])
    opcheck_samples(syncbn.reduce_bn, [(dy, x, mean, inv_std, last)])
    for running in ((None, None, None), (mean, inv_std.abs(), count[0])):
        opcheck_samples(syncbn.batch_statistics, [(x, *running, 1e-5, 0.1, last)])
    opcheck_samples(
        syncbn.batchnorm_backward, [(dy, x, mean, inv_std, weight, sums, sums, count, last)]
    )
    opcheck_samples(batchnorm_gradients, [(dy, x, mean, inv_std, weight, count, last)])


def test_ops_refuse_what_would_be_unsafe(device):
    (x,) = inputs((2, 3, 4), torch.float32, False, device)
    v = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="input must be contiguous"):
        syncbn.welford_mean_var(x.transpose(0, 2), False)
    with pytest.raises(RuntimeError, match="expected float64, float32, float16 or bfloat16"):
        syncbn.welford_mean_var(x.int(), False)
    with pytest.raises(RuntimeError, match=r"mean must be contiguous, with 3 elements of float32"):
        syncbn.batchnorm_forward(x, None, v[:2], v, v, v, False, False)
    with pytest.raises(RuntimeError, match="z must be contiguous, with 24 elements"):
        syncbn.batchnorm_forward(x, x.half(), v, v, v, v, False, False)
    with pytest.raises(RuntimeError, match="grad_output must be contiguous, with 24 elements"):
        syncbn.reduce_bn(x[:1].contiguous(), x, v, v, False)
    with pytest.raises(RuntimeError, match="count must be contiguous, with 1 elements of int64"):
        syncbn.batchnorm_backward(x, x, v, v, v, v, v, v[:1], False)
