"""What is kept beside parameters whose dtype changes between steps."""

from functools import partial

import pytest
import torch

from apex.optimizers import FusedAdam, FusedMixedPrecisionLamb


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
