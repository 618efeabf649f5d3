"""Numbers that the raw operators of optimizers refuse, by name, before they change anything."""

import copy

import pytest
import torch

from apex.optimizers.fused_adagrad.ops import adagrad_step
from apex.optimizers.fused_adam.ops import adam_step, adam_step_capturable
from apex.optimizers.fused_adam_compact import adam_compact_peaks, adam_step_compact
from apex.optimizers.fused_lamb.ops import lamb_stage1, lamb_step
from apex.optimizers.fused_lars.ops import lars_step
from apex.optimizers.fused_novograd.ops import novograd_step
from apex.optimizers.fused_sgd.ops import sgd_step

HYPER = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 1,
    "momentum": 0.9,
}
NAN = float("nan")
BAD = {"step": [0, -3], "beta1": [1.0, -0.1, NAN], "beta2": [1.0, 1.5], "eps": [-1e-8, NAN]}
ADAM = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")


def _adam(h, p, g, m, v):
    adam_step(p, g, m, v, [], [], *(h[name] for name in ADAM), True, True)


def _capturable(h, p, g, m, v):
    lr = torch.ones(1, device=p[0].device)
    numbers = (h["beta1"], h["beta2"], h["eps"], h["weight_decay"], True, True)
    adam_step_capturable(p, g, m, v, [], [], lr, lr.int(), None, None, *numbers)


def _compact(h, p, g, m, v):
    adam_step_compact(p, g, m, v, [], None, None, *(h[name] for name in ADAM), True, True)


def _peaks(h, p, g, m, v):
    adam_compact_peaks(p, g, m, v, [], None, *(h[name] for name in ADAM), True, True)


def _lamb(h, p, g, m, v, device_step=None):
    numbers = (h["lr"], None, h["beta1"], h["beta2"], h["eps"], h["weight_decay"], h["step"])
    flags = (True, True, True, False, False)
    lamb_step(p, g, m, v, [], *numbers, device_step, *flags, None, 0.0, None, None, None)


def _stage1(h, p, g, m, v):
    one = torch.ones(1, device=p[0].device)
    updates = [torch.empty_like(t) for t in p]
    numbers = (h["beta1"], h["beta2"], h["eps"], h["step"])
    lamb_stage1(g, p, m, v, updates, one, *numbers, one, 1.0)


def _novograd(h, p, g, m, v, device_step=None):
    norms = torch.zeros(len(p), device=p[0].device)
    numbers = (h[name] for name in ADAM)
    flags = (True, True, False, False, True, False)
    novograd_step(p, g, m, norms, *numbers, *flags, None, None, device_step)


def _adagrad(h, p, g, m, v):
    adagrad_step(p, g, v, h["lr"], h["eps"], h["weight_decay"], False, False)


def _sgd(h, p, g, m, v):
    numbers = (h["momentum"], 0.0, h["weight_decay"])
    sgd_step(p, g, m, [], h["lr"], None, *numbers, False, False, False, 1.0, None)


def _lars(h, p, g, m, v):
    numbers = (0.1, h["eps"], h["momentum"], h["weight_decay"])
    lars_step(p, g, m, [], None, None, h["lr"], None, *numbers, False, False, 1.0, None)


OPERATORS = {
    "adam_step": (_adam, ["step", "beta1", "beta2", "eps"]),
    "adam_step_capturable": (_capturable, ["beta1", "beta2", "eps"]),
    "adam_step_compact": (_compact, ["step", "beta1", "beta2", "eps"]),
    "adam_compact_peaks": (_peaks, ["beta1", "beta2"]),
    "lamb_step": (_lamb, ["step", "beta1", "beta2", "eps"]),
    "lamb_stage1": (_stage1, ["step", "beta1", "beta2", "eps"]),
    "novograd_step": (_novograd, ["step", "beta1", "beta2", "eps"]),
    "adagrad_step": (_adagrad, ["eps"]),
    "sgd_step": (_sgd, ["momentum"]),
    "lars_step": (_lars, ["eps", "momentum"]),
}
REFUSED = [
    (op, name, value)
    for op, (_, names) in OPERATORS.items()
    for name in names
    for value in (BAD | {"momentum": [-0.5, NAN]})[name]
]


def lists(device):
    return [[torch.ones(5, device=device)] for _ in range(4)]


@pytest.mark.parametrize(("op", "name", "value"), REFUSED)
def test_bad_numbers_are_named_and_nothing_is_changed(op, name, value, device):
    own = lists(device)
    before = copy.deepcopy(own)
    with pytest.raises(RuntimeError, match=rf"^{op}: {name} must be .*got -?[0-9n]"):
        OPERATORS[op][0](HYPER | {name: value}, *own)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(own, before, strict=True))


@pytest.mark.parametrize("op", OPERATORS)
def test_what_scripts_pass_is_taken(op, device):
    """Zeros, and a negative learning rate, which ascends."""
    zeros = dict.fromkeys(("beta1", "beta2", "weight_decay"), 0.0)
    OPERATORS[op][0](HYPER | zeros | {"lr": -0.1}, *lists(device))


@pytest.mark.parametrize("call", [_lamb, _novograd])
def test_a_step_on_the_device_takes_the_place_of_the_number(call, device):
    own = lists(device)
    device_step = torch.ones(1, dtype=torch.int32, device=device)
    call(HYPER | {"step": 0}, *own, device_step=device_step)
    assert own[0][0].isfinite().all()
