"""scale, axpby and l2norm over lists of tensors against float64, and the applier around them."""

import itertools
import sys

import pytest
import torch

from apex.multi_tensor_apply import (
    MultiTensorApply,
    multi_tensor_applier,
    multi_tensor_applier_l2norm,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_scale,
)
from apex_testkit import FLOATS, assert_as_accurate_as, opcheck_samples
from apex_testkit.grids import LAYOUTS, channels_last

# Packs are of 64 elements, chunks of a reduction of 65,536.
SIZES = {
    "one": [1],
    "empty": [0],
    "odd": [1, 7, 1023],
    "with_empty": [0, 5, 0, 64, 0],
    "scalar": [()],
    "many": [3] * 300,
    "large": [65_535, 65_536, 65_537, 300_001],
}
NARROW = [torch.float32, torch.float16, torch.bfloat16]


def make(sizes, device, dtype=torch.float32):
    return [torch.randn(n, device=device).to(dtype) for n in sizes]


def zero_flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


# ---- scale


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("in_dtype", FLOATS, ids=str)
def test_scale_is_exact_but_for_one_rounding(in_dtype, out_dtype, sizes, device):
    inputs, flag = make(sizes, device, in_dtype), zero_flag(device)
    outputs = [torch.full_like(x, float("nan"), dtype=out_dtype) for x in inputs]
    multi_tensor_scale(inputs, outputs, flag, 0.3)
    assert flag.item() == 0
    for x, y in zip(inputs, outputs, strict=True):
        wide = torch.float64 if torch.float64 in (in_dtype, out_dtype) else torch.float32
        factor = torch.tensor(0.3, dtype=wide, device=device)
        assert torch.equal(y, (x.to(wide) * factor).to(out_dtype))


def test_scale_works_in_place(device):
    values, flag = make([5, 129], device), zero_flag(device)
    expected = [v * 0.25 for v in values]
    multi_tensor_scale(values, values, flag, 0.25)
    assert all(torch.equal(v, e) for v, e in zip(values, expected, strict=True))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("position", ["first", "middle", "last"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scale_flags_inf_and_nan_and_still_writes(dtype, position, bad, device):
    for size, tensor in itertools.product((1, 63, 64, 65, 4099), (0, 1, 2)):
        inputs = make([size] * 3, device, dtype)
        where = {"first": 0, "middle": size // 2, "last": size - 1}[position]
        inputs[tensor][where] = bad
        outputs, flag = [torch.zeros_like(x) for x in inputs], zero_flag(device)
        multi_tensor_scale(inputs, outputs, flag, 2.0)
        assert flag.item() == 1
        assert torch.equal(outputs[tensor].isfinite(), inputs[tensor].isfinite())
        assert torch.equal(outputs[(tensor + 1) % 3], inputs[(tensor + 1) % 3] * 2)


def test_scale_tests_inputs_not_outputs_and_never_clears(device):
    big = torch.full((70,), 60000.0, device=device)
    output, flag = torch.empty(70, dtype=torch.float16, device=device), zero_flag(device)
    multi_tensor_scale([big], [output], flag, 1e6)
    assert output.isinf().all()
    assert flag.item() == 0
    flag.fill_(1)
    multi_tensor_scale([big], [output], flag, 1.0)
    assert flag.item() == 1


# ---- axpby


@pytest.mark.parametrize(
    "dtypes",
    [*itertools.product(NARROW, repeat=3), (torch.float64,) * 3],
    ids=lambda d: "-".join(str(t).removeprefix("torch.") for t in d),
)
def test_axpby_combines_any_dtypes(dtypes, device):
    sizes = [0, 1, 65, 1023]
    xs, ys = make(sizes, device, dtypes[0]), make(sizes, device, dtypes[1])
    outputs = [torch.empty_like(x, dtype=dtypes[2]) for x in xs]
    multi_tensor_axpby(xs, ys, outputs, zero_flag(device), 0.3, -1.7)
    for x, y, out in zip(xs, ys, outputs, strict=True):
        assert out.dtype == dtypes[2]
        assert_as_accurate_as(lambda x, y: 0.3 * x + -1.7 * y, out, x, y)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_axpby_sizes_and_in_place(sizes, device):
    xs, ys = make(sizes, device), make(sizes, device)
    before = [x.clone() for x in xs]
    multi_tensor_axpby(xs, ys, xs, zero_flag(device), 2.0, 0.5)
    for out, x, y in zip(xs, before, ys, strict=True):
        assert_as_accurate_as(lambda x, y: 2.0 * x + 0.5 * y, out, x, y)


@pytest.mark.parametrize("position", [0, 500, 1022], ids=["first", "middle", "last"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_axpby_checks_the_chosen_operand(dtype, bad, position, device):
    for arg_to_check, in_x in itertools.product((-1, 0, 1), (True, False)):
        xs, ys = make([7, 1023], device, dtype), make([7, 1023], device, dtype)
        (xs if in_x else ys)[1][position] = bad
        outputs, flag = [torch.empty_like(x) for x in xs], zero_flag(device)
        multi_tensor_axpby(xs, ys, outputs, flag, 1.0, 1.0, arg_to_check)
        assert flag.item() == (arg_to_check == -1 or (arg_to_check == 0) == in_x)
        assert outputs[1].isfinite().sum() == 1022


# ---- l2norm


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


# ---- all of them


def run_all(xs, ys):
    flag = zero_flag(xs[0].device)
    scaled, summed = [torch.empty_like(x) for x in xs], [torch.empty_like(x) for x in xs]
    multi_tensor_scale(xs, scaled, flag, 3.0)
    multi_tensor_axpby(xs, ys, summed, flag, 2.0, 3.0)
    return scaled, summed, multi_tensor_l2norm(xs, flag, True)[1]


def check_all(xs, ys):
    scaled, summed, norms = run_all(xs, ys)
    for x, y, by_3, total, norm in zip(xs, ys, scaled, summed, norms, strict=True):
        assert torch.equal(by_3, x * 3)
        assert_as_accurate_as(lambda x, y: 2 * x + 3 * y, total, x, y)
        assert_as_accurate_as(norm_of_all, norm.reshape(1), x)


def test_dense_memory_in_any_order(device):
    """Tensors of one index share a layout; those of other indices may have another one."""
    shapes = [
        channels_last(torch.randn(2, 5, 3, 4)),
        channels_last(torch.randn(2, 3, 2, 3, 4)),
        torch.randn(3, 5).t(),
        torch.randn(4, 3, 2).permute(2, 0, 1),
        torch.randn(1, 7, 1).transpose(0, 2),
        torch.randn(130),
    ]
    xs = [x.to(device) for x in shapes]
    ys = [torch.randn_like(x) for x in xs]
    check_all(xs, ys)


@pytest.mark.parametrize("layout", ["misaligned", "transposed"])
def test_alignment_and_transposition(layout, device):
    xs = [LAYOUTS[layout](torch.randn(33, 65, device=device)) for _ in range(2)]
    ys = [LAYOUTS[layout](torch.randn(33, 65, device=device)) for _ in range(2)]
    check_all(xs, ys)


@pytest.mark.parametrize("layout", ["every_second", "row_slice"])
def test_gaps_are_refused(layout, device):
    x = LAYOUTS[layout](torch.randn(4, 6, device=device))
    y, flag = torch.zeros(4, 6, device=device), zero_flag(device)
    ok = torch.ones(3, device=device)
    with pytest.raises(
        RuntimeError, match=r"multi_tensor_scale: a tensor was not contiguous.*\[1\]"
    ):
        multi_tensor_scale([ok, x], [ok, y], flag, 2.0)
    with pytest.raises(RuntimeError, match="multi_tensor_axpby: a tensor was not contiguous"):
        multi_tensor_axpby([ok, y], [ok, y], [ok, x], flag, 1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"not contiguous.*inputs\[1\] is \[4, 6\] float32"):
        multi_tensor_l2norm([ok, x])
    assert ok.eq(1).all()
    assert not y.any()


def test_layouts_that_differ_are_refused(device):
    x = torch.randn(2, 3, 4, 5, device=device)
    y = torch.zeros_like(channels_last(x))
    with pytest.raises(RuntimeError, match="in the memory format of its peers"):
        multi_tensor_scale([x], [y], zero_flag(device), 2.0)
    assert not y.any()


def test_ten_thousand_tiny_tensors(device):
    check = slice(None, None, 999)
    xs, ys = make([100] * 10_000, device), make([100] * 10_000, device)
    scaled, summed, norms = run_all(xs, ys)
    for x, y, by_3, total in zip(xs[check], ys[check], scaled[check], summed[check], strict=True):
        assert torch.equal(by_3, x * 3)
        assert_as_accurate_as(lambda x, y: 2 * x + 3 * y, total, x, y)
    reference = torch.stack([x.double().norm() for x in xs])
    torch.testing.assert_close(norms.double(), reference, rtol=2e-7, atol=0)


def test_bad_lists_are_refused(device):
    x, flag = [torch.ones(3, device=device), torch.ones(4, device=device)], zero_flag(device)
    y = [torch.zeros_like(t) for t in x]
    with pytest.raises(RuntimeError, match="outputs has 1 tensors, but inputs has 2"):
        multi_tensor_scale(x, y[:1], flag, 1.0)
    with pytest.raises(
        RuntimeError, match=r"size mismatch.*inputs\[1\] is \[4\].*outputs\[1\] is \[3\]"
    ):
        multi_tensor_scale(x, [y[0], y[0]], flag, 1.0)
    with pytest.raises(
        RuntimeError, match=r"one dtype. outputs\[0\] is \[3\] float32.*\[4\] float16"
    ):
        multi_tensor_scale(x, [y[0], y[1].half()], flag, 1.0)
    with pytest.raises(
        RuntimeError, match="expected float64, float32, float16 or bfloat16, got int"
    ):
        multi_tensor_l2norm([torch.ones(3, dtype=torch.int32, device=device)])
    with pytest.raises(RuntimeError, match="float64 lists combine with float64 lists only"):
        multi_tensor_axpby([t.double() for t in x], y, y, flag, 1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"arg_to_check must be 0 \(xs\), 1 \(ys\) or -1"):
        multi_tensor_axpby(x, y, y, flag, 1.0, 1.0, 2)
    for bad_flag in (flag.float(), torch.zeros(2, dtype=torch.int32, device=device)):
        with pytest.raises(RuntimeError, match="flag must be one int32 number on the device"):
            multi_tensor_scale(x, y, bad_flag, 1.0)
    assert not any(t.any() for t in y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ops_pass_opcheck(dtype, device):
    xs, ys = make([5, 130], device, dtype), make([5, 130], device, dtype)
    outs = [torch.empty_like(x) for x in xs]
    opcheck_samples(multi_tensor_scale, [(xs, outs, zero_flag(device), 0.5)])
    opcheck_samples(multi_tensor_axpby, [(xs, ys, outs, zero_flag(device), 0.5, 2.0, 0)])
    opcheck_samples(multi_tensor_l2norm, [(xs,), (xs, zero_flag(device), True), (xs, None, False)])


def test_ops_compile_into_one_graph(device):
    def clip(xs, flag):
        norm, _ = multi_tensor_l2norm(xs, flag)
        outs = [torch.empty_like(x) for x in xs]
        multi_tensor_scale(xs, outs, flag, 0.5)
        multi_tensor_axpby(xs, outs, outs, flag, 1.0, 2.0)
        return [norm * 2, flag + 0, *outs]

    xs = make([5, 130], device)
    expected = clip(xs, zero_flag(device))
    actual = torch.compile(clip, fullgraph=True)(xs, zero_flag(device))
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


# ---- the applier


def test_applier_passes_its_chunk_size_on():
    seen = []
    result = MultiTensorApply(333)(lambda *args: seen.append(args) or "result", "flag", [[]], 1, 2)
    assert result == "result"
    assert seen == [(333, "flag", [[]], 1, 2)]
    assert multi_tensor_applier.chunk_size == multi_tensor_applier_l2norm.chunk_size == 2048 * 32


def test_available_is_not_state_of_the_class(monkeypatch):
    applier = MultiTensorApply(1)
    assert MultiTensorApply.available is True
    assert applier.available is True
    assert applier.import_err is None
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "amp_C", None)  # as if it could not be imported
        broken = MultiTensorApply(7)
        assert broken.chunk_size == 7
        assert not broken.available
        assert not MultiTensorApply.available
        assert isinstance(broken.import_err, ImportError)
        with pytest.raises(RuntimeError, match="amp_C is not available"):
            broken(print, None, [])
    assert applier.available
    assert broken.available
