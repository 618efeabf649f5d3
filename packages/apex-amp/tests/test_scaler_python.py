"""Unscaling one gradient at a time: the functions that scripts import from apex.amp.scaler."""

import warnings

import pytest
import torch

from apex.amp.scaler import (
    LossScaler,
    axpby_check_overflow_python,
    scale_check_overflow_python,
)
from apex_testkit import assert_as_accurate_as

half, single = torch.float16, torch.float32
BAD = [float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("source", [half, torch.bfloat16, single], ids=str)
def test_scale(source, device):
    grad = torch.randn(33, device=device).to(source)
    master = torch.empty(33, device=device)
    assert scale_check_overflow_python(grad, master, 1 / 3, check_overflow=True) is False
    assert_as_accurate_as(lambda g: g / 3, master, grad)
    assert scale_check_overflow_python(master, master, 1.0) is False


@pytest.mark.parametrize("bad", BAD)
def test_overflow_writes_nothing(bad, device):
    grad = torch.tensor([1.0, bad], device=device)
    for gradient in (grad, grad.to_sparse()):
        master = torch.zeros(2, device=device)
        assert scale_check_overflow_python(gradient, master, 2.0, check_overflow=True)
        assert axpby_check_overflow_python(gradient, None, master, 2.0, 1.0, check_overflow=True)
        assert master.tolist() == [0.0, 0.0]
        assert not scale_check_overflow_python(gradient, master, 2.0)
        assert master[0].item() == 2.0


def test_a_large_finite_sum_is_no_overflow():
    grad = torch.full((4,), 3e38)
    assert not scale_check_overflow_python(grad, grad, 1.0, check_overflow=True)
    assert not axpby_check_overflow_python(grad, None, grad, 1.0, 1.0, check_overflow=True)


def test_sparse():
    grad = torch.tensor([0.0, 3.0]).to_sparse()
    master = torch.ones(2)
    scale_check_overflow_python(grad, master, 2.0)
    assert master.tolist() == [0.0, 6.0]
    axpby_check_overflow_python(grad, torch.ones(2), master, 2.0, 5.0)
    assert master.tolist() == [5.0, 11.0]


def test_axpby(device):
    grad, stash = torch.randn(33, device=device).half(), torch.randn(33, device=device)
    master = torch.empty(33, device=device)
    assert axpby_check_overflow_python(grad, stash, master, 0.25, 3.0, True) is False
    assert_as_accurate_as(lambda g, s: 0.25 * g + 3.0 * s, master, grad, stash)
    axpby_check_overflow_python(None, stash, master, 0.25, 2.0)
    assert torch.equal(master, 2.0 * stash)
    axpby_check_overflow_python(grad, None, master, 2.0, 3.0)
    assert torch.equal(master, 2.0 * grad.float())
    old = stash.clone()
    axpby_check_overflow_python(grad, stash, stash, 1.0, 1.0)  # written in place
    assert torch.equal(stash, grad.float() + old)
    bad_stash = torch.full((33,), BAD[0], device=device)
    assert not axpby_check_overflow_python(grad, bad_stash, master, 1.0, 1.0, True)
    with pytest.raises(TypeError, match="expected one dtype"):
        axpby_check_overflow_python(grad, stash.half(), master, 1.0, 1.0)


@pytest.mark.parametrize("scale", ["dynamic", 8.0])
def test_methods(scale):
    scaler = LossScaler(scale)
    grads = [torch.full((2,), 16.0), None, torch.tensor([1.0, BAD[0]]), torch.full((2,), 8.0)]
    masters = [torch.zeros(2) for _ in grads]
    scaler.unscale_python(grads, masters, 8.0)
    assert masters[0].tolist() == [2.0, 2.0]
    assert masters[1].tolist() == [0.0, 0.0]
    # A dynamic scale stops at the inf; a static one does not look for it.
    assert scaler._has_overflow == scaler.dynamic
    assert masters[3].tolist() == ([0.0, 0.0] if scaler.dynamic else [1.0, 1.0])
    assert scaler.update_scale() == scaler.dynamic
    scaler.clear_overflow_state()
    assert not scaler._has_overflow
    stashed = [torch.ones(2), torch.ones(2), torch.ones(2), None]
    scaler.unscale_with_stashed_python(grads, stashed, masters, 0.5, 3.0)
    assert masters[0].tolist() == [11.0, 11.0]
    assert masters[1].tolist() == [3.0, 3.0]
    assert scaler._has_overflow == scaler.dynamic
    if not scaler.dynamic:
        assert masters[3].tolist() == [4.0, 4.0]


def test_warns_once_of_16_bit_masters(monkeypatch):
    monkeypatch.setattr(LossScaler, "warned_unscaling_non_fp32_grad", False)
    grad = torch.ones(2).half()
    with pytest.warns(UserWarning, match="torch.float16"):
        LossScaler(2.0).unscale_python([grad], [grad], 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LossScaler(2.0).unscale_python([grad], [grad], 2.0)
