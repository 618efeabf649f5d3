"""Calls under torch.inference_mode leave nothing that later steps could not write to."""

import contextlib
from functools import partial

import pytest
import torch

from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from apex_testkit.optimizer_models import everything

MODES = {
    "adagrad": partial(FusedAdagrad, lr=0.1),
    "adam": partial(FusedAdam, lr=0.1),
    "amsgrad": partial(FusedAdam, lr=0.1, amsgrad=True),
    "by_chance": partial(FusedAdam, lr=0.1, stochastic_rounding=True),
    "capturable": partial(FusedAdam, lr=0.1, capturable=True),
    "float8": partial(FusedAdam, lr=0.1, exp_avg_dtype=torch.uint8),
    "masters": partial(FusedAdam, lr=0.1, master_weights=True),
    "half_masters": partial(
        FusedAdam, lr=0.1, master_weights=True, master_weight_dtype=torch.float16
    ),
    "remainders": partial(FusedAdam, lr=0.1, master_weights=True, store_param_remainders=True),
    "lamb": partial(FusedLAMB, lr=0.1),
    "lars": partial(FusedLARS, lr=0.1, momentum=0.9),
    "mp_lamb": partial(FusedMixedPrecisionLamb, lr=0.1, reduced_precision_dtype=torch.bfloat16),
    "novograd": partial(FusedNovoGrad, lr=0.1),
    "novograd_zero": partial(FusedNovoGrad, lr=0.1, init_zero=True),
    "sgd": partial(FusedSGD, lr=0.1, momentum=0.9),
}
all_modes = pytest.mark.parametrize("make", MODES.values(), ids=MODES.keys())


def params_of(device):
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16)
    values = [torch.randn(5, generator=generator).to(device, dtype) for dtype in dtypes]
    return [torch.nn.Parameter(value) for value in values]


def step(optimizer, params, seed):
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(seed * 10 + index)
        param.grad = torch.randn(5, generator=generator).to(param)
    optimizer.step()


def mode(inside):
    return torch.inference_mode() if inside else contextlib.nullcontext()


def run(make, device, calls):
    """Parameters and the optimizer after it was made, stepped, loaded, and stepped."""
    params = params_of(device)
    with mode("make" in calls):
        optimizer = make(params)
    for seed, inside in enumerate((True, False, False, True, False)):
        with mode(inside and "step" in calls):
            step(optimizer, params, seed)
    with mode("load" in calls):
        optimizer.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        params[0].clamp_(-0.5, 0.5)  # its master, if there is one, is written to
    for seed in range(5, 8):
        step(optimizer, params, seed)
    return params, optimizer


@pytest.mark.parametrize("call", ["make", "step", "load"])
@all_modes
def test_later_steps_outside_go_on(make, call, device):
    params, optimizer = run(make, device, {call})
    expected, reference = run(make, device, set())
    kept, others = everything(optimizer, params), everything(reference, expected)
    assert kept.keys() == others.keys()
    assert all(torch.equal(value, others[key]) for key, value in kept.items())
    assert not any(v.is_inference() for state in optimizer.state.values() for v in state.values())
    numbers = [v for group in optimizer.param_groups for v in group.values()]
    assert not any(v.is_inference() for v in numbers if isinstance(v, torch.Tensor))


def test_a_state_that_was_made_inside_has_a_master_that_follows_its_parameter(device):
    params = params_of(device)
    optimizer = MODES["masters"](params)
    with torch.inference_mode():
        optimizer.initialize_state(params[0])
    with torch.no_grad():
        params[0].fill_(0.5)
    step(optimizer, params, 0)
    master = optimizer.state[params[0]]["master_param"]
    assert torch.equal(master.to(torch.bfloat16), params[0])
    assert (master - 0.5).abs().max() <= 0.1001


def test_the_mode_is_that_of_before_after_a_step_and_after_an_error(device):
    params = params_of(device)
    optimizer = MODES["adam"](params)
    with torch.inference_mode():
        step(optimizer, params, 0)
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
        optimizer.param_groups[0]["eps"] = -1.0
        with pytest.raises(RuntimeError, match="eps must be >= 0"):
            optimizer.step()
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
