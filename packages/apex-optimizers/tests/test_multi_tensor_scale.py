"""multi_tensor_scale and multi_tensor_axpby against plain PyTorch: every dtype, flags, sizes."""

import itertools

import pytest
import torch

from apex.multi_tensor_apply import multi_tensor_axpby, multi_tensor_scale
from apex_testkit import FLOATS, SEVERAL_CHUNKS, assert_as_accurate_as

# Packs are of 64 elements.
SIZES = {
    "one": [1],
    "empty": [0],
    "odd": [1, 7, 1023],
    "with_empty": [0, 5, 0, 64, 0],
    "scalar": [()],
    "many": [3] * 300,
    "large": SEVERAL_CHUNKS,
}
NARROW = [torch.float32, torch.float16, torch.bfloat16]


def make(sizes, device, dtype=torch.float32):
    return [torch.randn(n, device=device).to(dtype) for n in sizes]


def zero_flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


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
