"""SyncBatchNorm on several ranks equals float64 batch normalization of all their batches."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from apex.parallel import SyncBatchNorm, create_syncbn_process_group
from apex.parallel.sync_batchnorm_kernel import SyncBatchnormFunction as GivenStatistics
from apex_testkit.accuracy import assert_as_accurate_as

CHANNELS = 5
ROWS = [3, 4, 1, 2]  # by rank
SHAPES = {
    "NCHW": ((CHANNELS, 4, 3), {}),
    "NCHW in channels_last memory": ((CHANNELS, 4, 3), {"memory_format": torch.channels_last}),
    "NCL": ((CHANNELS, 9), {}),
    "NC": ((CHANNELS,), {}),
    "NC11": ((CHANNELS, 1, 1), {}),
    "NHWC": ((4, 3, CHANNELS), {}),
    "NCDHW": ((CHANNELS, 2, 3, 2), {}),
}
# input dtype, parameter dtype
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]


def channels_second(x, last):
    return x.movedim(-1, 1) if last else x


def reference(rank, xs, zs, dys, weight, bias, means, eps, relu, last):
    """Output and gradients of one rank, and running statistics, by one batch norm of all."""
    x = torch.cat(xs).requires_grad_()
    z = None if zs is None else torch.cat(zs).requires_grad_()
    weight, bias = (None if v is None else v.requires_grad_() for v in (weight, bias))
    running_mean, running_var = means[0].clone(), means[1].clone()
    out = F.batch_norm(
        channels_second(x, last), running_mean, running_var, weight, bias, True, 0.2, eps
    )
    out = out.movedim(1, -1) if last else out
    out = out if z is None else out + z
    out = out.relu() if relu else out
    begin = sum(len(part) for part in xs[:rank])
    mine = slice(begin, begin + len(xs[rank]))
    dy = torch.cat(dys)
    inputs = [x] if z is None else [x, z]
    grads = torch.autograd.grad(out, inputs, dy, retain_graph=True)
    results = [out[mine], *(grad[mine] for grad in grads), running_mean, running_var]
    if weight is not None:  # of this rank's elements alone
        results += torch.autograd.grad(out[mine], [weight, bias], dy[mine])
    return results


def make(seed, shape, dtype, scale=1.0, offset=0.0, **layout):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset
    return values.to(dtype).contiguous(**layout) if len(shape) == 4 else values.to(dtype)


def check_case(
    rank, world, shape, layout, dtypes, last=False, use_z=False, relu=False, affine=True
):
    dtype, param_dtype = dtypes
    xs = [make(r, (ROWS[r], *shape), dtype, 2.0, 3.0, **layout) for r in range(world)]
    zs = [make(10 + r, (ROWS[r], *shape), dtype, **layout) for r in range(world)] if use_z else None
    dys = [make(20 + r, (ROWS[r], *shape), dtype, **layout) for r in range(world)]
    norm = SyncBatchNorm(CHANNELS, 1e-3, 0.2, affine, channel_last=last, fuse_relu=relu)
    norm = norm.to(param_dtype)
    buffers = make(30, (2, CHANNELS), param_dtype, 0.1, 1.0)
    with torch.no_grad():
        norm.running_mean.copy_(buffers[0])
        norm.running_var.copy_(buffers[1])
        if affine:
            norm.weight.copy_(make(31, (CHANNELS,), param_dtype))
            norm.bias.copy_(make(32, (CHANNELS,), param_dtype))
    x = xs[rank].clone().requires_grad_()
    z = zs[rank].clone().requires_grad_() if use_z else None
    out = norm(x, z)
    assert out.dtype == dtype
    assert out.stride() == x.stride()
    out.backward(dys[rank])
    actual = [out, x.grad, *([z.grad] if use_z else []), norm.running_mean, norm.running_var]
    actual += [norm.weight.grad, norm.bias.grad] if affine else []
    arguments = (rank, xs, zs, dys, norm.weight, norm.bias, buffers, 1e-3, relu, last)
    # Each result is rounded to its dtype once, after float32 statistics were. In float64 truth is
    # no better: it, too, carries the roundings of x - mean, numbers ten times the results.
    assert_as_accurate_as(reference, actual, *arguments, ulps=20 if dtype == torch.float64 else 2)
    assert norm.num_batches_tracked == 1


def check_grid(rank, world, dtypes, **options):
    for name, (shape, layout) in SHAPES.items():
        last = name == "NHWC"
        try:
            check_case(rank, world, shape, layout, dtypes, last=last, **options)
        except Exception as error:
            raise AssertionError(f"{name}, {dtypes}, {options}") from error


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_equals_batch_norm_of_all_batches(two_ranks, four_ranks, dtypes):
    two_ranks(check_grid, dtypes=dtypes)
    four_ranks(check_grid, dtypes=dtypes)


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=str)
def test_added_input_and_relu(two_ranks, dtypes):
    two_ranks(check_grid, dtypes=dtypes, relu=True)
    two_ranks(check_grid, dtypes=dtypes, use_z=True)
    two_ranks(check_grid, dtypes=dtypes, use_z=True, relu=True)
    two_ranks(check_grid, dtypes=dtypes, use_z=True, relu=True, affine=False)


def check_groups(rank, world):
    """Ranks 0, 1 and 2, 3 share statistics; other pairs do not."""
    group = create_syncbn_process_group(2)
    assert dist.get_process_group_ranks(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert create_syncbn_process_group(0) is None
    with pytest.raises(ValueError, match=r"group_size must divide the world size 4 .*got 3"):
        create_syncbn_process_group(3)
    with pytest.raises(ValueError, match="got -1"):
        create_syncbn_process_group(-1)
    norm = SyncBatchNorm(1, eps=0.0, momentum=1.0, affine=False, process_group=group).double()
    out = norm(torch.tensor([[float(rank)]], dtype=torch.float64))
    assert out.item() == (-1.0) ** (rank % 2 == 0)
    assert norm.running_mean.item() == rank // 2 * 2 + 0.5
    alone = create_syncbn_process_group(1)
    norm._specify_process_group(alone)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(torch.tensor([[float(rank)]], dtype=torch.float64))


def test_process_groups(four_ranks):
    four_ranks(check_groups)


def check_foreign_group(rank, world):
    norm = SyncBatchNorm(1, process_group=dist.new_group([0]))
    if rank == 0:
        norm(torch.ones(2, 1))
    else:
        with pytest.raises(ValueError, match="SyncBatchNorm: rank 1 is not in process_group"):
            norm(torch.ones(2, 1))


def test_group_without_this_rank_is_refused(two_ranks):
    two_ranks(check_foreign_group)


def check_counts(rank, world):
    """Beyond 2**24 a count is no float32; an empty and a single-element batch count as such."""
    from apex.parallel._shared.native.rank_statistics import gather_statistics

    count = 2**24 + 1 + rank
    for dtype in (torch.float32, torch.float64):
        mean = torch.full((3,), float(rank), dtype=dtype)
        means, variances, counts = gather_statistics(mean, mean + 0.5, count, None, world)
        assert counts.tolist() == [2**24 + 1 + r for r in range(world)]
        assert means.tolist() == [[float(r)] * 3 for r in range(world)]
        assert variances.tolist() == [[r + 0.5] * 3 for r in range(world)]
    norm = SyncBatchNorm(2, momentum=1.0).double()
    x = torch.arange(8.0, dtype=torch.float64).view(4, 2)[: 4 * rank].requires_grad_()
    norm(x).sum().backward()  # everything lies on rank 1
    assert x.grad.shape == x.shape
    assert norm.running_mean.tolist() == [3.0, 4.0]
    assert norm.running_var.tolist() == [20 / 3] * 2
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    with pytest.raises(ValueError, match="1 values on all 2 ranks"):
        norm(torch.ones(rank, 2, dtype=torch.float64))
    assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())
    norm(torch.ones(1, 2, dtype=torch.float64))  # one per rank is enough


def test_counts(two_ranks):
    two_ranks(check_counts)


def check_given(rank, world):
    """sync_batchnorm_kernel's function: statistics reduced by the caller."""
    xs = [make(r, (ROWS[r], CHANNELS, 3), torch.float64) for r in range(world)]
    dys = [make(20 + r, (ROWS[r], CHANNELS, 3), torch.float64) for r in range(world)]
    weight, bias = make(31, (2, CHANNELS), torch.float64)
    whole = torch.cat(xs)
    var, mean = torch.var_mean(whole, (0, 2), unbiased=False)
    x = xs[rank].clone().requires_grad_()
    w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    out = GivenStatistics.apply(x, w, b, mean, var, 1e-3, None, world)
    out.backward(dys[rank])
    buffers = torch.stack([mean, var])
    wanted = reference(rank, xs, None, dys, weight, bias, buffers, 1e-3, False, False)
    for mine, true in zip((out, x.grad, w.grad, b.grad), wanted[:2] + wanted[-2:], strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-13)


def test_given_statistics(two_ranks):
    two_ranks(check_given)


def check_training(rank, world):
    """Three steps of a small network under DistributedDataParallel equal one process's."""
    from apex.parallel import DistributedDataParallel, convert_syncbn_model

    def network():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(1)
        ).double()

    batches = torch.randn(3, world * 4, 2, 5, 5, generator=torch.Generator().manual_seed(1))
    alone, mine = network(), network()
    for model in (alone, mine):
        torch.manual_seed(0)
        model(batches[0].double())
    mine = DistributedDataParallel(convert_syncbn_model(mine), message_size=20)
    for model in (alone, mine):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches.double():
            local = batch if model is alone else batch.chunk(world)[rank]
            optimizer.zero_grad()
            model(local).square().mean().backward()
            optimizer.step()
    for (name, a), b in zip(
        alone.state_dict().items(), mine.module.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11, msg=name)


def test_training_with_ddp(two_ranks):
    two_ranks(check_training)
