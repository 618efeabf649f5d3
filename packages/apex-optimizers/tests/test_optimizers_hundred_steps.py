"""A hundred steps of every optimizer against float64, for every dtype and pair of options.

FusedLAMB and FusedMixedPrecisionLamb have the same in their own tests.
"""

import itertools

import pytest
import torch

from apex.optimizers import FusedAdagrad, FusedAdam, FusedLARS, FusedNovoGrad, FusedSGD
from apex_testkit import FLOATS, assert_as_accurate_as
from apex_testkit.optimizers import adam_reference, run_steps, sgd_reference
from apex_testkit.optimizers_adagrad import adagrad_reference
from apex_testkit.optimizers_lars import lars_reference
from apex_testkit.optimizers_novograd import novograd_reference

STEPS = 100
# Optimizer, reference, what is always given, and the options of which pairs are tried.
OPTIMIZERS = {
    "adagrad": (
        FusedAdagrad,
        adagrad_reference,
        {"lr": 1e-2},
        {"weight_decay": 0.1, "adagrad_w_mode": True, "eps": 1e-3, "maximize": True},
    ),
    "adam": (
        FusedAdam,
        adam_reference,
        {"lr": 2**-7},  # exact in float32, which capturable rounds it to
        {
            "weight_decay": 0.1,
            "adam_w_mode": False,
            "betas": (0.5, 0.9),
            "eps": 1e-3,
            "bias_correction": False,
            "capturable": True,
        },
    ),
    "lars": (
        FusedLARS,
        lars_reference,
        {"lr": 0.1, "trust_coefficient": 0.1, "momentum": 0.5},
        {"weight_decay": 0.1, "nesterov": True, "eps": 1.0, "maximize": True},
    ),
    "novograd": (
        FusedNovoGrad,
        novograd_reference,
        {"lr": 2**-7},
        {
            "weight_decay": 0.1,
            "betas": (0.95, 0.98),
            "reg_inside_moment": True,
            "grad_averaging": False,
            "norm_type": 0,
            "init_zero": True,
            "bias_correction": False,
            "capturable": True,
        },
    ),
    "sgd": (
        FusedSGD,
        sgd_reference,
        {"lr": 1e-2, "momentum": 0.9},
        {"weight_decay": 0.1, "nesterov": True, "wd_after_momentum": True, "maximize": True},
    ),
}


def pairs():
    for name, (*_, options) in OPTIMIZERS.items():
        for pair in itertools.combinations(options, 2):
            yield pytest.param(name, pair, id="-".join((name, *pair)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("name", "pair"), list(pairs()))
def test_hundred_steps(name, pair, dtype, device):
    cls, reference, always, options = OPTIMIZERS[name]
    hyper = {**always, **{option: options[option] for option in pair}}
    value = torch.randn(130, device=device, dtype=dtype)
    grads = [torch.randn_like(value) for _ in range(STEPS)]
    param = torch.nn.Parameter(value.clone())
    run_steps(cls, [param], [[g] for g in grads], **hyper)
    hyper.pop("capturable", None)  # changes where numbers are, not what they are
    assert_as_accurate_as(
        lambda p, *g: reference(p, *g, **hyper),
        param.detach(),
        value,
        *grads,
        ulps=STEPS,  # the parameter is rounded once in each step
    )
