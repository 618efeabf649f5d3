"""The ops scale, scale_ and axpby, and the functions that sort gradients for them."""

import itertools

import pytest
import torch

from apex.amp.multi_tensor import axpby, scale, scale_
from apex.amp.multi_tensor.lists import axpby_lists, scale_lists
from apex_testkit import FLOATS, LARGE, LAYOUTS, assert_as_accurate_as, opcheck_samples
from apex_testkit.grids import channels_last

SIZES = {"one": [1], "odd": [1, 7, 1023], "empty": [0, 5], "many": [3] * 200, "large": LARGE}
BAD = [float("inf"), float("-inf"), float("nan")]
HALF_OR_FLOAT = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = [*itertools.product(HALF_OR_FLOAT, HALF_OR_FLOAT), (torch.float64, torch.float64)]


def flag(device="cpu"):
    return torch.zeros(1, dtype=torch.int32, device=device)


def tensors(sizes, dtype, device):
    return [torch.randn(n, device=device).to(dtype) for n in sizes]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_scale_against_float64(sizes, pair, device):
    source, target = pair
    inputs = tensors(sizes, source, device)
    outputs = [torch.empty_like(x, dtype=target) for x in inputs]
    found = flag(device)
    scale(inputs, outputs, found, 1 / 3)
    assert found.item() == 0
    for x, out in zip(inputs, outputs, strict=True):
        if x.numel():
            assert_as_accurate_as(lambda x: x * (1 / 3), out, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scale_in_place(dtype, device):
    for run in (lambda x, f: scale(x, x, f, 0.3), lambda x, f: scale_(x, f, 0.3)):
        inputs = tensors([5, 0, 1027], dtype, device)
        before = [x.clone() for x in inputs]
        found = flag(device)
        run(inputs, found)
        assert found.item() == 0
        for x, old in zip(inputs, before, strict=True):
            if x.numel():
                assert_as_accurate_as(lambda x: x * 0.3, x, old)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_axpby_against_float64(pair, device):
    source, target = pair
    xs, ys = tensors([1, 1027], source, device), tensors([1, 1027], target, device)
    outputs = [torch.empty_like(y) for y in ys]
    axpby(xs, ys, outputs, flag(device), 0.3, -1.7, 0)
    for x, y, out in zip(xs, ys, outputs, strict=True):
        # Plain rounds to the inputs' dtype, which for mixed lists is not the output's.
        assert_as_accurate_as(lambda x, y: 0.3 * x - 1.7 * y, out, x, y)


@pytest.mark.parametrize("position", [0, 15, 16, 1026])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_bad_value_is_found(dtype, bad, position, device):
    inputs = tensors([4, 1027], dtype, device)
    inputs[1][position] = bad
    outputs = [torch.empty_like(x) for x in inputs]
    for run in (
        lambda found: scale(inputs, outputs, found, 0.5),
        lambda found: scale_([x.clone() for x in inputs], found, 0.5),
        lambda found: axpby(inputs, outputs, outputs, found, 1.0, 0.0, 0),
        lambda found: axpby(outputs[::-1], inputs[::-1], outputs[::-1], found, 0.0, 1.0, 1),
        lambda found: axpby(outputs[::-1], inputs[::-1], outputs[::-1], found, 0.0, 1.0, -1),
    ):
        for out in outputs:
            out.zero_()
        found = flag(device)
        run(found)
        assert found.item() == 1


def test_large_finite_values_are_no_overflow(device):
    """Their sum would be infinite; each of them is not."""
    inputs = [torch.full((1000,), 3e38, device=device)]
    found = flag(device)
    scale(inputs, inputs, found, 0.5)
    assert found.item() == 0


def test_flag_is_never_cleared(device):
    found = flag(device) + 1
    x = [torch.ones(3, device=device)]
    scale(x, x, found, 1.0)
    axpby(x, x, x, found, 1.0, 1.0, -1)
    assert found.item() == 1


def test_axpby_tests_only_the_chosen_list(device):
    good, bad = [torch.ones(40, device=device)], [torch.full((40,), torch.inf, device=device)]
    out = [torch.empty(40, device=device)]
    for xs, ys, checked, expected in (
        *((bad, good, 0, 1), (bad, good, 1, 0), (bad, good, -1, 1)),
        *((good, bad, 0, 0), (good, bad, 1, 1), (good, bad, -1, 1)),
    ):
        found = flag(device)
        axpby(xs, ys, out, found, 1.0, 1.0, checked)
        assert found.item() == expected


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_lists_take_every_layout(layout, device):
    base = torch.randn(6, 10, device=device)
    for x, out in itertools.product((base, layout(base)), (base.clone(), layout(base.clone()))):
        expected = x.clone() * 0.25
        scale_lists([x], [out], lambda _: flag(device), 0.25)
        assert torch.equal(out, expected)
    x = layout(base.half())
    y = layout(base.clone())
    expected = 0.5 * x.float() + 2.0 * y
    axpby_lists([x], [y], [y], lambda _: flag(device), 0.5, 2.0)
    assert torch.equal(y, expected)
    z = [layout(base.clone()), base.half()]
    scale_lists(z, z, lambda _: flag(device), 0.25)
    assert torch.equal(z[0], base * 0.25)
    assert torch.equal(z[1], base.half() * 0.25)
    scale_lists(z, z[:], lambda _: flag(device), 4.0)
    assert torch.equal(z[0], base)


def test_channels_last_needs_no_copy(device):
    x = channels_last(torch.randn(2, 3, 4, 5, device=device))
    out = torch.empty_like(x)
    assert not x.is_contiguous()
    scale([x], [out], flag(device), 0.25)
    assert torch.equal(out, x * 0.25)


def test_expanded_gradient_of_a_sum(device):
    x = torch.ones(1, device=device).expand(8)
    out = torch.empty(8, device=device)
    scale_lists([x], [out], lambda _: flag(device), 0.5)
    assert torch.equal(out, torch.full_like(out, 0.5))


def test_lists_of_mixed_dtypes(device):
    inputs = [torch.randn(5, device=device).to(dtype) for dtype in FLOATS * 3]
    outputs = [
        x.clone() if x.dtype is torch.float64 else torch.empty_like(x, dtype=torch.float32)
        for x in inputs
    ]
    inputs[-1][2] = torch.inf
    found = flag(device)
    scale_lists(inputs, outputs, lambda _: found, 0.5)
    assert found.item() == 1
    for x, out in zip(inputs, outputs, strict=True):
        assert torch.equal(out, x.to(out.dtype) * 0.5)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x, f: scale([x, x], [x], f, 1.0), "2 tensors|1 tensors"),
        (lambda x, f: scale([x], [x[:2]], f, 1.0), "same number of elements"),
        (lambda x, f: scale([x], [x.double()], f, 1.0), "float64 does not mix"),
        (lambda x, f: scale([x, x.half()], [x, x], f, 1.0), "one dtype"),
        (lambda x, f: scale([x.int()], [x.int()], f, 1.0), "expected float64"),
        (lambda x, f: scale([x[::2]], [x[::2]], f, 1.0), "not contiguous"),
        (lambda x, f: scale([x], [x], f.long(), 1.0), "found_inf must be one int32"),
        (lambda x, f: scale([x], [x], f.expand(2), 1.0), "found_inf must be one int32"),
        (lambda x, f: scale_([x, x.half()], f, 1.0), "one dtype"),
        (lambda x, f: scale_([x[::2]], f, 1.0), "not contiguous"),
        (lambda x, f: axpby([x], [x], [x], f, 1.0, 1.0, 2), "arg_to_check"),
        (lambda x, f: axpby([x], [x.half()], [x], f, 1.0, 1.0, 0), "ys and outputs"),
    ],
)
def test_errors_change_nothing(call, text, device):
    x, found = torch.randn(4, device=device), flag(device)
    before = x.clone()
    with pytest.raises(RuntimeError, match=text):
        call(x, found)
    assert torch.equal(x, before)
    assert found.item() == 0


def test_empty_lists_do_nothing(device):
    scale([], [], flag(device), 1.0)
    scale_([], flag(device), 1.0)
    scale_lists([], [], lambda _: flag(device), 1.0)
    axpby([], [], [], flag(device), 1.0, 1.0, 0)


def test_opcheck(device):
    x, y = (
        [torch.randn(n, device=device).half() for n in (3, 17)],
        tensors([3, 17], FLOATS[1], device),
    )
    opcheck_samples(scale, [(x, y, flag(device), 0.5), (y, y, flag(device), 0.5)])
    opcheck_samples(scale_, [(x, flag(device), 0.5)])
    opcheck_samples(axpby, [(x, y, [t.clone() for t in y], flag(device), 1.0, 2.0, 0)])


def test_compiles(device):
    def run(x, y):
        a, b, found = torch.empty_like(x), torch.empty_like(x), flag(device)
        scale([x], [a], found, 0.5)
        scale_([a], found, 0.5)
        axpby([a], [y], [b], found, 1.0, 2.0, 0)
        return a, b, found

    x, y = tensors([33, 33], torch.float32, device)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for expected, actual in zip(run(x, y), compiled(x, y), strict=True):
        assert torch.equal(expected, actual)
