"""multi_tensor_l2norm_scale against float64: dtypes, layouts, flags, long lists, threads."""

import pytest
import torch

from apex.multi_tensor_apply import multi_tensor_l2norm_scale
from apex.multi_tensor_apply.multi_tensor_l2norm_scale import multi_tensor_scale_norms
from apex_testkit import FLOATS, SEVERAL_CHUNKS, assert_as_accurate_as
from apex_testkit.grids import HALVES, LAYOUTS, channels_last
from apex_testkit.opcheck import opcheck_samples

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
    # float64 with bits of its own. The square of an odd number is 1 modulo 8: sums of squares of
    # float32 numbers lose these last bits to rounding, all in one direction.
    drawn = torch.promote_types(dtype, torch.float32)
    return [torch.randn(n, device=device, dtype=drawn).to(dtype) for n in sizes]


def zero_flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


def norm_of_all(*xs):
    return torch.cat([x.flatten() for x in xs]).square().sum().sqrt().reshape(1)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scales_and_measures(dtype, sizes, device):
    xs, flag = make(sizes, device, dtype), zero_flag(device)
    ys = [torch.empty_like(x) for x in xs]
    norm, norms = multi_tensor_l2norm_scale(xs, ys, flag, -0.3, True)
    assert flag.item() == 0
    ulps = 2 if dtype == torch.float64 else 1  # truth rounds as often: the sum, and its root
    assert_as_accurate_as(norm_of_all, norm, *xs, ulps=ulps)
    for x, y, own in zip(xs, ys, norms, strict=True):
        assert_as_accurate_as(norm_of_all, own.reshape(1), x, ulps=ulps)
        if x.numel():
            assert_as_accurate_as(lambda x: -0.3 * x, y, x)
    alone, empty = multi_tensor_l2norm_scale(xs, ys, flag, 1.0)
    assert torch.equal(alone, norm)
    assert empty.shape == (0,)


@pytest.mark.parametrize("output", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_outputs_have_their_own_dtype_and_layouts_agree(dtype, output, device):
    xs = [
        LAYOUTS["transposed"](torch.randn(4, 7, device=device)).to(dtype),
        channels_last(torch.randn(2, 5, 3, 7, device=device)).to(dtype),
        LAYOUTS["misaligned"](torch.randn(130, device=device).to(dtype)),
    ]
    ys = [torch.empty_like(x, dtype=output) for x in xs]
    norm, _ = multi_tensor_l2norm_scale(xs, ys, zero_flag(device), 0.5)
    assert_as_accurate_as(norm_of_all, norm, *xs)
    for x, y in zip(xs, ys, strict=True):
        assert torch.equal(y, (x * 0.5).to(output))  # a power of two: nothing is rounded


def test_in_place(device):
    xs = make([5, 70_001], device)
    before = [x.clone() for x in xs]
    norm, _ = multi_tensor_l2norm_scale(xs, xs, zero_flag(device), 0.5)
    assert_as_accurate_as(norm_of_all, norm, *before)
    assert all(torch.equal(x, b * 0.5) for x, b in zip(xs, before, strict=True))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_flags_inf_and_nan_and_still_writes(dtype, bad, device):
    xs = make([5, 70_001], device, dtype)
    xs[1][65_536] = bad
    ys, flag = [torch.empty_like(x) for x in xs], zero_flag(device)
    norm, norms = multi_tensor_l2norm_scale(xs, ys, flag, 2.0, True)
    assert flag.item() == 1
    assert not norm.isfinite().item()
    assert norms.isfinite().tolist() == [True, False]
    assert torch.equal(ys[0], xs[0] * 2)


def test_does_not_depend_on_threads():
    xs = make([3, 100_000, 70_001, 17] * 5, "cpu")
    ys = [torch.empty_like(x) for x in xs]
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(multi_tensor_l2norm_scale(xs, ys, zero_flag("cpu"), 0.5, True))
    for norms in zip(*results, strict=True):
        assert all(torch.equal(norms[0], other) for other in norms[1:])


def test_op_is_a_citizen_of_torch(device):
    xs, ys = make([5, 130], device), make([5, 130], device)
    opcheck_samples(multi_tensor_scale_norms, [(xs, ys, zero_flag(device), 0.5, True)])
    compiled = torch.compile(lambda x, y, f: multi_tensor_l2norm_scale(x, y, f, 0.5, True))
    eager = multi_tensor_l2norm_scale(xs, ys, zero_flag(device), 0.5, True)
    for a, b in zip(compiled(xs, ys, zero_flag(device)), eager, strict=True):
        torch.testing.assert_close(a, b)


def test_bad_lists(device):
    xs = make([5, 7], device)
    with pytest.raises(RuntimeError, match="at least one tensor"):
        multi_tensor_l2norm_scale([], [], zero_flag(device), 1.0)
    with pytest.raises(RuntimeError, match="size mismatch"):
        multi_tensor_l2norm_scale(xs, xs[::-1], zero_flag(device), 1.0)
    with pytest.raises(RuntimeError, match="must have one dtype"):
        multi_tensor_l2norm_scale([xs[0], xs[1].double()], xs, zero_flag(device), 1.0)
    with pytest.raises(RuntimeError, match="outputs has 1 tensors"):
        multi_tensor_l2norm_scale(xs, xs[:1], zero_flag(device), 1.0)
