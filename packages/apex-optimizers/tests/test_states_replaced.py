"""Every optimizer goes on when somebody replaces, moves, re-lays or drops what it keeps."""

import gc
import weakref
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

MAKERS = {
    "adam": partial(FusedAdam, lr=0.1),
    "adagrad": partial(FusedAdagrad, lr=0.1),
    "lamb": partial(FusedLAMB, lr=0.1),
    "lars": partial(FusedLARS, lr=0.1, momentum=0.9),
    "mp_lamb": partial(FusedMixedPrecisionLamb, lr=0.1),
    "novograd": partial(FusedNovoGrad, lr=0.1),
    "sgd": partial(FusedSGD, lr=0.1, momentum=0.9),
}
all_optimizers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
counting = pytest.mark.parametrize(
    "make",
    [m for k, m in MAKERS.items() if k not in ("lars", "sgd")],
    ids=lambda m: m.func.__name__,
)
channels_last = partial(torch.Tensor.to, memory_format=torch.channels_last)


def values_of(device, count=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 4, 5, generator=generator).to(device) for _ in range(count)]


def params_of(device, count=2):
    return [torch.nn.Parameter(v) for v in values_of(device, count)]


def steps(optimizer, params, count=1):
    for index in range(count):
        for p in params:
            p.grad = torch.full_like(p, index + 1.0)
        optimizer.step()


def moment_of(optimizer, param):
    return next(k for k, v in optimizer.state[param].items() if v.shape == param.shape)


def equal(params, others):
    return all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


@counting
def test_states_moved_key_by_key_count_on(make, device):
    """As scripts do that offload states to the CPU and back."""
    params = params_of(device, 3)
    optimizer = make(params)
    steps(optimizer, params, 5)
    for entry in optimizer.state.values():
        for key, value in entry.items():
            entry[key] = value.clone()
    steps(optimizer, params, 5)
    assert [float(e["step"]) for e in optimizer.state_dict()["state"].values()] == [10.0] * 3


def test_scales_moved_key_by_key_stay_those_of_the_moments(device):
    params, others = params_of(device), params_of(device)
    make = partial(FusedAdam, exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float16)
    optimizer, untouched = make(params), make(others)
    steps(optimizer, params)
    steps(untouched, others)
    for entry in optimizer.state.values():
        for key, value in entry.items():
            entry[key] = value.clone()
    for own, own_params in ((optimizer, params), (untouched, others)):
        for p in own_params:
            p.grad = torch.full_like(p, 1e4)
        own.step()
    for p, q in zip(params, others, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            a, b = optimizer.get_unscaled_state(p, name), untouched.get_unscaled_state(q, name)
            assert torch.equal(a, b)


def test_a_second_initialize_state_keeps_the_count(device):
    params = params_of(device)
    optimizer = FusedAdam(params)
    steps(optimizer, params, 3)
    optimizer.initialize_state(params[1])
    steps(optimizer, params, 2)
    assert [float(optimizer.state[p]["step"]) for p in params] == [5.0, 5.0]


@pytest.mark.parametrize("groups", [1, 2])
@all_optimizers
def test_parameters_of_another_layout(make, groups, device):
    params, plain = params_of(device), params_of(device)
    split = (lambda ps: [{"params": [p]} for p in ps]) if groups == 2 else list
    optimizer, reference = make(split(params)), make(split(plain))
    steps(optimizer, params, 2)
    params[1].data = channels_last(params[1].data)
    steps(optimizer, params, 2)
    steps(reference, plain, 2)
    steps(reference, plain, 2)
    assert params[1].is_contiguous(memory_format=torch.channels_last)
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(p, q)
    key = moment_of(optimizer, params[1])
    assert optimizer.state[params[1]][key].stride() == params[1].stride()


@all_optimizers
def test_a_loaded_state_takes_the_layout_of_parameters_that_change_later(make, device):
    params, others = params_of(device), params_of(device)
    first, second = make(params), make(others)
    steps(first, params)
    second.load_state_dict(first.state_dict())
    for p in others:
        p.data = channels_last(p.data)
    steps(second, others)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in others)


@all_optimizers
def test_a_state_of_another_dtype_is_converted(make, device):
    params = params_of(device)
    optimizer = make([{"params": [p]} for p in params])
    steps(optimizer, params, 2)
    key = moment_of(optimizer, params[1])
    optimizer.state[params[1]][key] = optimizer.state[params[1]][key].double()
    steps(optimizer, params)
    assert optimizer.state[params[1]][key].dtype == torch.float32


@all_optimizers
def test_a_state_of_another_shape_changes_nothing(make, device):
    params = params_of(device)
    optimizer = make([{"params": [p]} for p in params])
    steps(optimizer, params, 2)
    before = [p.detach().clone() for p in params]
    key = moment_of(optimizer, params[1])
    optimizer.state[params[1]][key] = torch.zeros(7, device=device)
    with pytest.raises(RuntimeError, match=rf"state '{key}' of parameter 0 is \[7\] float32"):
        steps(optimizer, params)
    assert equal(params, before)


@all_optimizers
def test_a_cleared_state_starts_anew(make, device):
    params, fresh = params_of(device), params_of(device)
    optimizer = make(params)
    steps(optimizer, params, 2)
    optimizer.state[params[0]].clear()
    with torch.no_grad():
        fresh[0].copy_(params[0])
    again = make(fresh[:1])
    steps(again, fresh[:1])
    steps(optimizer, params)
    if make.func not in (FusedLAMB, FusedMixedPrecisionLamb):  # whose norm is of all gradients
        assert torch.equal(params[0], fresh[0])


@all_optimizers
def test_a_moment_that_was_taken_out_starts_anew(make, device):
    params = params_of(device)
    optimizer = make(params)
    steps(optimizer, params, 2)
    key = moment_of(optimizer, params[0])
    del optimizer.state[params[0]][key]
    steps(optimizer, params)
    assert optimizer.state[params[0]][key].shape == params[0].shape


@all_optimizers
def test_entries_that_are_no_states_stay(make, device):
    params = params_of(device)
    optimizer = make(params)
    optimizer.state["extra"] = 5
    steps(optimizer, params, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    steps(optimizer, params)
    assert optimizer.state["extra"] == 5


@all_optimizers
def test_no_groups_no_step(make, device):
    optimizer = make(params_of(device))
    optimizer.param_groups.clear()
    optimizer.step()


@all_optimizers
def test_clearing_the_state_frees_it(make, device):
    params = params_of(device)
    optimizer = make(params)
    steps(optimizer, params, 3)
    key = moment_of(optimizer, params[0])
    moment = weakref.ref(optimizer.state[params[0]][key])
    optimizer.state.clear()
    gc.collect()
    assert moment() is None
    steps(optimizer, params)


@all_optimizers
def test_parameters_of_a_group_that_was_taken_out_are_freed(make, device):
    params = params_of(device)
    optimizer = make([{"params": [p]} for p in params])
    steps(optimizer, params, 3)
    taken = params.pop()
    optimizer.param_groups.pop()
    del optimizer.state[taken]
    known = weakref.ref(taken)
    del taken
    steps(optimizer, params, 2)
    gc.collect()
    assert known() is None


@all_optimizers
def test_a_group_that_was_taken_out_stays_as_it_was(make, device):
    params = params_of(device)
    optimizer = make([{"params": [p]} for p in params])
    steps(optimizer, params, 2)
    optimizer.param_groups.pop()  # its states stay
    before = params[-1].detach().clone(), params[0].detach().clone()
    steps(optimizer, params)
    assert torch.equal(params[-1], before[0])
    assert not torch.equal(params[0], before[1])


def test_a_group_in_the_place_of_another_is_used(device):
    params = params_of(device)
    optimizer = FusedAdam(params, lr=0.1)
    steps(optimizer, params, 2)
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.0}
    before = [p.detach().clone() for p in params]
    steps(optimizer, params)
    assert all(map(torch.equal, params, before))
    assert optimizer.param_groups[0]["step"] == 3


@all_optimizers
def test_a_refused_gradient_starts_no_state_of_another_group(make, device):
    params = params_of(device)
    optimizer = make([{"params": [p]} for p in params])
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    params[0].grad = torch.ones_like(params[0]).to_sparse()
    params[1].grad = torch.ones_like(params[1])
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert params[1] not in optimizer.state
