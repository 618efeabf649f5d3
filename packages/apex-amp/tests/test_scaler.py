"""The loss scaler: its state machine, and unscaling."""

import pytest
import torch

from apex.amp.scaler import LossScaler
from apex_testkit import assert_as_accurate_as

INF = float("inf")


def overflow(scaler, value=INF):
    scaler.clear_overflow_state()
    grad = torch.tensor([1.0, value])
    scaler.unscale([grad], [grad], None, models_are_masters=True)
    return scaler.update_scale()


def test_dynamic_defaults():
    scaler = LossScaler("dynamic")
    assert scaler.dynamic
    assert scaler.loss_scale() == 65536.0
    assert (scaler._unskipped, scaler._scale_seq_len, scaler._has_overflow) == (0, 2000, False)
    assert (scaler._min_loss_scale, scaler._max_loss_scale) == (None, 2.0**24)
    assert scaler._overflow_buf.tolist() == [0]
    assert scaler._overflow_buf.dtype is torch.int32


def test_scale_follows_overflows():
    scaler = LossScaler("dynamic", scale_window=3)
    assert overflow(scaler)
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**15, 0)
    seen = []
    for _ in range(7):
        assert not overflow(scaler, 1.0)
        seen.append((scaler.loss_scale(), scaler._unskipped))
    low, high, top = 2.0**15, 2.0**16, 2.0**17
    assert seen == [(low, 1), (low, 2), (high, 0), (high, 1), (high, 2), (top, 0), (top, 1)]


def test_growth_takes_2000_clean_iterations():
    scaler = LossScaler("dynamic")
    for _ in range(1999):
        scaler.update_scale()
    assert scaler.loss_scale() == 65536.0
    scaler.update_scale()
    assert (scaler.loss_scale(), scaler._unskipped) == (131072.0, 0)


@pytest.mark.parametrize("factor", [4.0, 1.5])
def test_scale_factor_is_used(factor):
    scaler = LossScaler("dynamic", init_scale=64.0, scale_factor=factor, scale_window=1)
    overflow(scaler)
    assert scaler.loss_scale() == 64.0 / factor
    overflow(scaler, 1.0)
    assert scaler.loss_scale() == pytest.approx(64.0, rel=1e-15)  # two roundings of a double


def test_bounds():
    scaler = LossScaler("dynamic", scale_window=1, min_loss_scale=2.0**15, max_loss_scale=2.0**16)
    for expected in (2.0**15, 2.0**15):
        overflow(scaler)
        assert scaler.loss_scale() == expected
    for expected in (2.0**16, 2.0**16):
        overflow(scaler, 1.0)
        assert scaler.loss_scale() == expected
    assert LossScaler("dynamic", max_loss_scale=128.0).loss_scale() == 128.0


def test_no_bounds():
    scaler = LossScaler("dynamic", scale_window=1, min_loss_scale=0, max_loss_scale=None)
    for _ in range(20):
        overflow(scaler, 1.0)
    assert scaler.loss_scale() == 2.0**36
    for _ in range(40):
        overflow(scaler)
    assert scaler.loss_scale() == 2.0**-4


def test_static_scale_never_skips():
    scaler = LossScaler(128.0)
    assert not scaler.dynamic
    assert not overflow(scaler)
    assert not overflow(scaler, 1.0)
    assert (scaler.loss_scale(), scaler._unskipped) == (128.0, 2)


def test_a_delayed_check_is_not_lost():
    scaler = LossScaler("dynamic")
    grad = torch.tensor([INF])
    scaler.unscale([grad], [grad])
    scaler.delay_check()
    assert overflow(scaler, 1.0)
    assert not overflow(scaler, 1.0)


def test_delayed_checks_are_told_apart():
    scaler = LossScaler("dynamic")
    for owner, value in (("first", 1.0), ("second", INF), ("second", 1.0), ("third", 1.0)):
        grad = torch.tensor([value])
        scaler.clear_overflow_state()
        scaler.unscale([grad], [grad])
        scaler.delay_check([owner])
    assert scaler.update_scale()
    assert scaler.late_overflows == ["second"]
    assert not scaler.update_scale()
    assert scaler.late_overflows == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_scale": 0.0},
        {"loss_scale": -1.0},
        {"loss_scale": INF},
        {"loss_scale": "high"},
        {"init_scale": 0.0},
        {"scale_factor": 1.0},
        {"scale_window": 0},
        {"min_loss_scale": -1.0},
        {"max_loss_scale": 0.0},
        {"min_loss_scale": 4.0, "max_loss_scale": 2.0},
    ],
    ids=str,
)
def test_wrong_arguments(arguments):
    with pytest.raises(ValueError, match=r"LossScaler|float"):
        LossScaler(**{"loss_scale": "dynamic", **arguments})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", ["dynamic", 3.0, 1.0])
def test_unscale_against_float64(scale, dtype, device):
    scaler = LossScaler(scale)
    grads = [torch.randn(n, device=device).to(dtype) for n in (1, 33, 4097)]
    masters = [torch.empty_like(g, dtype=torch.float32) for g in grads]
    scaler.unscale(grads, masters, scaler.loss_scale())
    for grad, master in zip(grads, masters, strict=True):
        assert_as_accurate_as(lambda g: g / scaler.loss_scale(), master, grad)
    assert scaler.overflow_buf(grads[0].device).item() == 0


def test_unscale_by_an_override(device):
    grad = torch.tensor([6.0], device=device)
    scaler = LossScaler(1.0)
    scaler.unscale([grad], [grad], models_are_masters=True, scale_override=2.0)
    assert grad.item() == 3.0


@pytest.mark.parametrize("override", [None, (4.0, 2.0, 8.0)])
def test_unscale_with_stashed_against_float64(override, device):
    scaler = LossScaler(16.0)
    new = [torch.randn(n, device=device).half() for n in (1, 33, 4097)]
    stashed = [torch.randn(n, device=device) for n in (1, 33, 4097)]
    old = [s.clone() for s in stashed]
    scaler.unscale_with_stashed(new, stashed, stashed, override)
    grad, stash, out = override or (16.0, 1.0, 1.0)
    for n, s, result in zip(new, old, stashed, strict=True):
        assert_as_accurate_as(lambda n, s: n * (out / grad) + s * (out / stash), result, n, s)


def test_only_new_gradients_are_tested(device):
    scaler = LossScaler("dynamic")
    stashed = [torch.tensor([INF], device=device)]
    scaler.unscale_with_stashed([torch.ones(1, device=device)], stashed, stashed)
    assert not scaler.update_scale()


def test_nothing_is_unscaled_after_an_overflow(device):
    scaler = LossScaler("dynamic")
    scaler._has_overflow = True
    grad = torch.ones(1, device=device)
    scaler.unscale([grad], [grad])
    scaler.unscale_with_stashed([grad], [grad], [grad])
    assert grad.item() == 1.0


def test_a_flag_of_the_scripts_own():
    """NVIDIA's BERT unscales with amp_C and hands its flag to the scaler."""
    scaler = LossScaler("dynamic")
    scaler.unscale([torch.ones(2)], [torch.ones(2)])
    flag = torch.zeros(1, dtype=torch.int32)
    scaler._overflow_buf = flag
    assert scaler._overflow_buf is flag
    assert not scaler.update_scale()
    flag.fill_(1)
    scaler._overflow_buf = flag
    assert scaler.update_scale()
    assert scaler.loss_scale() == 2.0**15
    scaler.clear_overflow_state()
    assert flag.item() == 0
    scaler.unscale([torch.tensor([float("inf")])], [torch.ones(1)])
    assert flag.item() == 1


@pytest.mark.parametrize("is_before", [False, True])
def test_a_subclass_with_a_flag_of_its_own(is_before):
    class Scaler(LossScaler):
        def __init__(self):
            if is_before:
                self._overflow_buf = torch.zeros(1, dtype=torch.int32)
            super().__init__("dynamic")
            if not is_before:
                self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    scaler = Scaler()
    scaler._overflow_buf.fill_(1)
    assert scaler.update_scale()
