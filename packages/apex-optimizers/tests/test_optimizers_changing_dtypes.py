"""What is kept beside parameters whose dtype changes between steps."""

import copy
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


def params_of(device, sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    return [torch.nn.Parameter(value) for value in values]


def step(optimizer, params):
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


def test_scaled_moments_keep_their_values_when_a_parameter_becomes_float64(device):
    params = params_of(device, [4])
    optimizer = FusedAdam(params, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16)
    step(optimizer, params)
    before = optimizer.get_unscaled_state(params[0], "exp_avg").double()
    params[0].grad = None
    params[0].data = params[0].data.double()
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], before * 0.9)


MASTERS = {
    "adam": partial(FusedAdam, master_weights=True),
    "capturable": partial(FusedAdam, master_weights=True, capturable=True),
    "remainders": partial(FusedAdam, master_weights=True, store_param_remainders=True),
    "mp_lamb": partial(FusedMixedPrecisionLamb, reduced_precision_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("make", MASTERS.values(), ids=MASTERS.keys())
def test_masters_come_and_go_with_the_dtype_of_their_parameter(make, count, device):
    params = params_of(device, [4] * count, torch.bfloat16)
    optimizer = make([{"params": [p]} for p in params])
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16, torch.float64):
        for param in params:
            param.grad = None
            param.data = param.data.to(dtype)
        step(optimizer, params)
        has_master = ["master_param" in optimizer.state[p] for p in params]
        assert has_master == [dtype == torch.bfloat16] * count


MODES = {
    **MASTERS,
    "plain_adam": FusedAdam,
    "amsgrad": partial(FusedAdam, amsgrad=True),
    "by_chance": partial(FusedAdam, stochastic_rounding=True),
    "float8": partial(FusedAdam, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16),
    "decoupled": partial(FusedAdam, use_decoupled_grad=True),
    "adagrad": FusedAdagrad,
    "lamb": FusedLAMB,
    "lamb_by_chance": partial(FusedLAMB, stochastic_rounding=True),
    "lars": partial(FusedLARS, momentum=0.9),
    "novograd": FusedNovoGrad,
    "sgd": partial(FusedSGD, momentum=0.9),
    "sgd_by_chance": partial(FusedSGD, momentum=0.9, stochastic_rounding=True),
}
CHANGES = [
    (before, after)
    for before in (torch.float32, torch.bfloat16, torch.float64)
    for after in (torch.float32, torch.bfloat16, torch.float64)
    if before != after
]


def step_all(optimizer, params, seed):
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(seed * 10 + index)
        gradient = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        setattr(param, "decoupled_grad" if is_decoupled(optimizer) else "grad", gradient)
    optimizer.step()


def dtypes_of(optimizer, params):
    return [{key: value.dtype for key, value in optimizer.state[p].items()} for p in params]


def is_decoupled(optimizer):
    return getattr(optimizer, "use_decoupled_grad", False)


@pytest.mark.parametrize("split", [False, True], ids=["one_group", "groups"])
@pytest.mark.parametrize(("before", "after"), CHANGES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("make", MODES.values(), ids=MODES.keys())
def test_parameters_of_another_dtype_are_stepped_as_by_a_fresh_optimizer(
    make, before, after, split, device
):
    """Of the new dtype from the start, that loads the state: the same bits and dtypes."""
    params = params_of(device, [4, 3], before)
    groups = partial(map, lambda param: {"params": [param]}) if split else list
    optimizer = make(groups(params), lr=0.01)
    for seed in range(3):
        step_all(optimizer, params, seed)
    saved = copy.deepcopy(optimizer.state_dict())
    others = [torch.nn.Parameter(param.detach().to(after)) for param in params]
    for param in params:
        param.grad = None
        param.data = param.data.to(after)
    fresh = make(groups(others), lr=0.01)
    fresh.load_state_dict(saved)
    for seed in range(3, 6):
        step_all(optimizer, params, seed)
        step_all(fresh, others, seed)
        kept, expected = everything(optimizer, params), everything(fresh, others)
        assert kept.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in kept.items())
        assert dtypes_of(optimizer, params) == dtypes_of(fresh, others)
