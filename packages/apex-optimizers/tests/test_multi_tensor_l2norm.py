"""multi_tensor_l2norm against float64: every dtype, range, flags, long lists, threads."""

import itertools

import pytest
import torch

from apex.multi_tensor_apply import multi_tensor_l2norm
from apex_testkit import FLOATS, SEVERAL_CHUNKS, assert_as_accurate_as

# Packs are of 64 elements, chunks of 65,536.
SIZES = {
    "one": [1],
    "empty": [0],
    "odd": [1, 7, 1023],
    "with_empty": [0, 5, 0, 64, 0],
    "scalar": [()],
    "many": [3] * 300,
    "batches": [3] * 10 + [0] * 480 + [5] * 10,  # on a GPU, one of them without elements
    "large": SEVERAL_CHUNKS,
}


def make(sizes, device, dtype=torch.float32):
    return [torch.randn(n, device=device).to(dtype) for n in sizes]


def zero_flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


def norm_of_all(*xs):
    return torch.cat([x.flatten() for x in xs]).square().sum().sqrt().reshape(1)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_l2norm_of_all_and_of_each(dtype, sizes, device):
    xs, flag = make(sizes, device, dtype), zero_flag(device)
    norm, norms = multi_tensor_l2norm(xs, flag, True)
    result = torch.float64 if dtype == torch.float64 else torch.float32
    assert (norm.dtype, norms.dtype) == (result, result)
    assert norms.shape == (len(xs),)
    assert flag.item() == 0
    assert_as_accurate_as(norm_of_all, norm, *xs)
    for x, own in zip(xs, norms, strict=True):
        assert_as_accurate_as(norm_of_all, own.reshape(1), x)
    alone, empty = multi_tensor_l2norm(xs)
    assert torch.equal(alone, norm)
    assert empty.shape == (0,)


@pytest.mark.parametrize("value", [1e-30, 1e-42, 3e-19, 1e25, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_l2norm_squares_do_not_leave_the_range(dtype, value, device):
    """Squares of these over- or underflow float32; their sum's root does not."""
    x = torch.full((70_001,), value, device=device, dtype=dtype)
    y = torch.ones(3, device=device, dtype=dtype)
    flag = zero_flag(device)
    _, norms = multi_tensor_l2norm([x, y], flag, True)
    expected = x.double().square().sum().sqrt()
    assert flag.item() == 0
    torch.testing.assert_close(
        norms[0].double(), expected.to(norms.dtype).double(), rtol=2e-7, atol=0
    )
    torch.testing.assert_close(
        norms[1].double(), torch.tensor(3.0, device=device).double().sqrt(), rtol=1e-7, atol=0
    )


def test_l2norm_of_a_huge_list_keeps_its_digits(device):
    """17 million terms of one size: adding them one by one in float32 would stop at 2^24."""
    xs = [torch.ones(100, device=device) for _ in range(10_000)]
    xs += [torch.ones(1 << 24, device=device)]
    norm, norms = multi_tensor_l2norm(xs, None, True)
    assert norm.item() == torch.tensor(1e6 + 2**24, dtype=torch.float64).sqrt().float().item()
    assert norms[:-1].eq(10).all()
    assert norms[-1] == 4096


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_l2norm_flags_inf_and_nan(dtype, bad, device):
    size = 65_536 + 77
    for position, tensor in itertools.product((0, size // 2, 65_536, size - 1), (0, 2)):
        xs = make([5, 64, size], device, dtype)
        xs[tensor].view(-1)[min(position, xs[tensor].numel() - 1)] = bad
        flag = zero_flag(device)
        norm, norms = multi_tensor_l2norm(xs, flag, True)
        assert flag.item() == 1
        assert not norm.isfinite().item()
        assert norms.isfinite().tolist() == [i != tensor for i in range(3)]


def test_l2norm_does_not_depend_on_threads():
    xs = make([3, 100_000, 70_001, 17] * 5, "cpu")
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(torch.cat(multi_tensor_l2norm(xs, None, True)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
