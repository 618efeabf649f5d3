"""The tolerance rule lets correct code pass and catches the mutations it was made for."""

import pytest
import torch
import torch.nn.functional as F

from apex_testkit import FLOATS, assert_as_accurate_as


def layer_norm(x):
    return F.layer_norm(x, x.shape[-1:])


def one_pass_layer_norm(x):
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) * torch.rsqrt(variance.clamp_min(0) + 1e-5)


def adam(p, g, *, inside=False, correct=True, beta1=0.9, beta2=0.999, eps=1e-3):
    m = (1 - beta1) * g
    v = (1 - beta2) * g * g
    if correct:
        m, v = m / (1 - beta1), v / (1 - beta2)
    root = (v + eps).sqrt() if inside else v.sqrt() + eps
    return p - m / root


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_accepts_correct_code(dtype):
    x = torch.randn(5, 67, dtype=dtype)
    two_pass = (x.double() - x.double().mean(-1, keepdim=True)) / (
        x.double().var(-1, correction=0, keepdim=True) + 1e-5
    ).sqrt()
    assert_as_accurate_as(layer_norm, two_pass.to(dtype), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_catches_an_error_of_a_few_ulps(dtype):
    x = torch.randn(1000, dtype=dtype)
    wrong = x * (1 + 8 * torch.finfo(dtype).eps)
    with pytest.raises(AssertionError, match="largest error"):
        assert_as_accurate_as(lambda x: x, wrong, x)
    assert_as_accurate_as(lambda x: x, wrong, x, ulps=17)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_catches_one_pass_variance(dtype):
    offset = 1e4 if dtype == torch.float32 else 1e8
    x = torch.randn(4, 512, dtype=dtype) + offset
    assert_as_accurate_as(layer_norm, layer_norm(x), x)
    with pytest.raises(AssertionError):
        assert_as_accurate_as(layer_norm, one_pass_layer_norm(x), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mutation", [{"inside": True}, {"correct": False}], ids=str)
def test_catches_wrong_adam(dtype, mutation):
    p, g = 0.1 * torch.randn(2, 1000, dtype=dtype)
    good = adam(p.double(), g.double()).to(dtype)
    assert_as_accurate_as(adam, good, p, g)
    bad = adam(p.double(), g.double(), **mutation).to(dtype)
    with pytest.raises(AssertionError):
        assert_as_accurate_as(adam, bad, p, g)


def test_catches_a_complement_taken_in_float32():
    """1 - float(0.9) is wrong in the seventh digit; float64 parameters must not see it."""
    g = torch.randn(1000, dtype=torch.float64)
    reference = lambda g: (1 - 0.9) * g
    rounded = 1 - torch.tensor(0.9).double().item()
    with pytest.raises(AssertionError):
        assert_as_accurate_as(reference, rounded * g, g)


def test_catches_statistics_kept_in_16_bits():
    x = torch.randn(8, 4096).bfloat16()
    mean = x.float().mean(-1)
    reference = lambda x: x.mean(-1)
    assert_as_accurate_as(reference, mean, x)
    with pytest.raises(AssertionError):
        assert_as_accurate_as(reference, mean.bfloat16().float(), x)


def test_float64_sums_may_differ_in_order():
    x = torch.randn(100_000, dtype=torch.float64) + 1e3
    assert_as_accurate_as(torch.sum, x.view(100, 1000).sum(0).sum(), x)


def test_float64_computed_in_float32_is_caught():
    x = torch.randn(16, 64, dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_as_accurate_as(layer_norm, layer_norm(x.float()).double(), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinities_and_nans_must_match(dtype):
    x = torch.tensor([1.0, float("inf"), -float("inf"), float("nan")], dtype=dtype)
    assert_as_accurate_as(lambda x: x * 2, x * 2, x)
    for i, value in [(0, float("nan")), (0, float("inf")), (1, 1.0), (2, float("inf")), (3, 0.0)]:
        wrong = x * 2
        wrong[i] = value
        with pytest.raises(AssertionError, match=rf"\[{i}\]"):
            assert_as_accurate_as(lambda x: x * 2, wrong, x)


def test_overflow_of_the_dtype_is_rounding():
    x = torch.tensor([60000.0, 3.0], dtype=torch.float16)
    assert_as_accurate_as(lambda x: x * 2, x * 2, x)
    with pytest.raises(AssertionError):
        assert_as_accurate_as(lambda x: x, torch.tensor([60000.0, torch.inf]).half(), x)


def test_overflow_of_an_intermediate_is_an_error():
    x = torch.full((4,), 1e30)
    norm = lambda x: (x * x).sum().sqrt()
    with pytest.raises(AssertionError):
        assert_as_accurate_as(norm, norm(x), x)
    assert_as_accurate_as(norm, torch.tensor(2e30), x)


def test_structures():
    x = torch.randn(3, 4)
    index = torch.arange(3)
    reference = lambda xs, i: (xs[0] + 1, None, [xs[1]["y"] * 2, i])
    args = ([x, {"y": x}], index)
    assert_as_accurate_as(reference, (x + 1, None, [x * 2, index]), *args)
    for wrong, name in [
        ((x + 1, None, [x * 2, index + 1]), r"output\[2\]\[1\]"),
        ((x + 1, None, [x * 3, index]), r"output\[2\]\[0\]"),
        ((x + 1, x, [x * 2, index]), r"output\[1\]"),
        ((x + 1, None), "expected 3 values"),
        (((x + 1)[:2], None, [x * 2, index]), r"float32 \[2, 4\]"),
    ]:
        with pytest.raises(AssertionError, match=name):
            assert_as_accurate_as(reference, wrong, *args)


def test_empty_results_are_compared_by_shape():
    x = torch.empty(0, 5)
    assert_as_accurate_as(layer_norm, x, x)
    with pytest.raises(AssertionError, match=r"\[0, 4\]"):
        assert_as_accurate_as(layer_norm, torch.empty(0, 4), x)


def test_references_may_take_gradients_and_write_in_place():
    x = torch.randn(6, requires_grad=True)
    gradient = lambda x: torch.autograd.grad(x.pow(3).sum(), x)[0]
    assert_as_accurate_as(gradient, 3 * x.detach() ** 2, x)
    before = x.detach().clone()
    assert_as_accurate_as(lambda x: x.mul_(2), before * 2, before)
    assert torch.equal(x.detach(), before)


def test_message_says_what_and_where():
    x = torch.zeros(2, 3)
    wrong = x.clone()
    wrong[1, 2] = 0.5
    with pytest.raises(AssertionError) as info:
        assert_as_accurate_as(lambda x: x, wrong, x)
    text = str(info.value)
    for part in ("5.000e-01", "[1, 2]", "got 0.5, truth 0", "1 of 6", "float32 [2, 3] on cpu"):
        assert part in text
