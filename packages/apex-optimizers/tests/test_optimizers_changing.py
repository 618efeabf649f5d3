"""Groups that are frozen and unfrozen, and parameters whose memory takes another form."""

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

PLAIN = {
    "adam": partial(FusedAdam, lr=0.1),
    "adagrad": partial(FusedAdagrad, lr=0.1),
    "lamb": partial(FusedLAMB, lr=0.1, max_grad_norm=0.0),
    "lars": partial(FusedLARS, lr=0.1, momentum=0.9),
    "mp_lamb": partial(FusedMixedPrecisionLamb, lr=0.1, max_grad_norm=0.0),
    "novograd": partial(FusedNovoGrad, lr=0.1),
    "sgd": partial(FusedSGD, lr=0.1, momentum=0.9),
}
MODES = {
    **PLAIN,
    "capturable": partial(FusedAdam, lr=0.1, capturable=True),
    "masters": partial(FusedAdam, lr=0.1, master_weights=True),
    "float8": partial(
        FusedAdam, lr=0.1, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.bfloat16
    ),
}
all_plain = pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN.keys())
all_modes = pytest.mark.parametrize("make", MODES.values(), ids=MODES.keys())


def params_of(device, sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    return [torch.nn.Parameter(value) for value in values]


def step(optimizer, params, present, seed):
    """A step with gradients of the parameters whose numbers are in ``present``."""
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(seed * 100 + index)
        gradient = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        param.grad = gradient if index in present else None
    optimizer.step()


JOINING = {
    "first_frozen": [(1, 2), (0, 1, 2)],
    "last_frozen": [(0, 1), (0, 1, 2), (0, 1, 2)],
    "one_by_one": [(2,), (1, 2), (0, 1, 2), (1,), (0, 1, 2)],
    "in_turn": [(1,), (0,), (2,), (0, 1), (2,), (0, 1, 2)],
}


@pytest.mark.parametrize("pattern", JOINING.values(), ids=JOINING.keys())
@pytest.mark.parametrize("one_group", [False, True], ids=["groups", "one_group"])
@all_modes
def test_parameters_that_join_late_are_stepped_as_alone(make, one_group, pattern, device):
    """Unfreezing a group; experts that get their first tokens one by one."""
    sizes, dtype = [5, 3, 4], torch.bfloat16 if "master_weights" in make.keywords else torch.float32
    params, alone = params_of(device, sizes, dtype), params_of(device, sizes, dtype)
    optimizer = make(params if one_group else [{"params": [p]} for p in params])
    own = [make([p]) for p in alone]
    for seed, present in enumerate(pattern):
        step(optimizer, params, present, seed)
        for index, single in enumerate(own):
            if index in present:
                step(single, alone, present, seed)
    assert all(torch.equal(p, q) for p, q in zip(params, alone, strict=True))
