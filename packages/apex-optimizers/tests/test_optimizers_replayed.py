"""Steps that a graph replays: nothing of the recorded step's count, rate or scale stays behind."""

import copy

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
from apex_testkit.replay import Recording

CAPTURABLE = {
    "adam": (FusedAdam, {"weight_decay": 0.1}),
    "amsgrad": (FusedAdam, {"weight_decay": 0.1, "amsgrad": True, "betas": (0.9, 0.5)}),
    "lamb": (FusedLAMB, {}),
    "novograd": (FusedNovoGrad, {"weight_decay": 0.1}),
    "novograd_from_zero": (FusedNovoGrad, {"init_zero": True, "norm_type": 0}),
    "novograd_inside": (FusedNovoGrad, {"reg_inside_moment": True, "weight_decay": 0.1}),
}
REPLAYABLE = {
    "adagrad": (FusedAdagrad, {"lr": 0.25}),
    "lars": (FusedLARS, {"lr": 0.25, "momentum": 0.9}),
    "sgd": (FusedSGD, {"lr": 0.25, "momentum": 0.9}),
}
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
all_capturable = pytest.mark.parametrize("kind", CAPTURABLE)


def make_params(device):
    shapes = [(7,), (130,), (0,), (3, 5)]
    return [
        torch.nn.Parameter(torch.randn(shape, device=device).to(dtype))
        for shape, dtype in zip(shapes, DTYPES, strict=True)
    ]


def make(kind, params, **more):
    cls, options = {**CAPTURABLE, **REPLAYABLE}[kind]
    return cls(params, **{"lr": 0.25, **options, **more})


def set_grads(params, seed):
    """Gradients of the same memory in every step, as a graph finds them."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        dtype = torch.complex64 if param.is_complex() else torch.float32
        grad = torch.randn(param.shape, generator=generator, dtype=dtype).to(param)
        param.grad = grad if param.grad is None else param.grad.copy_(grad)


def same_bits(ours, theirs):
    return all(torch.equal(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True))


def replayed(optimizer, params, steps=4):
    """Take ``steps`` steps, of which those after the second repeat its calls."""
    recording = None
    for step in range(1, steps + 1):
        set_grads(params, step)
        if step == 1:
            optimizer.step()
        elif step == 2:
            recording = Recording(
                optimizer.step, reads_cpu=not getattr(optimizer, "capturable", False)
            )
        else:
            recording.replay()
    return recording


@pytest.mark.parametrize("kind", [*CAPTURABLE, *REPLAYABLE])
def test_replays_are_further_steps(kind, device):
    ours = make_params(device)
    plain = copy.deepcopy(ours)
    replayed(make(kind, ours, **({"capturable": True} if kind in CAPTURABLE else {})), ours)
    expected = make(kind, plain)
    for step in range(1, 5):
        set_grads(plain, step)
        expected.step()
    assert same_bits(ours, plain)


@pytest.mark.parametrize("kind", ["amsgrad", "lamb", "novograd_from_zero", "sgd"])
def test_replays_of_complex_parameters_are_further_steps(kind, device):
    ours = [torch.nn.Parameter(torch.randn(9, device=device, dtype=torch.complex64))]
    plain = copy.deepcopy(ours)
    replayed(make(kind, ours, **({"capturable": True} if kind in CAPTURABLE else {})), ours)
    expected = make(kind, plain)
    for step in range(1, 5):
        set_grads(plain, step)
        expected.step()
    assert same_bits(ours, plain)


def test_replays_of_mixed_precision_lamb_are_further_steps(device):
    ours = make_params(device)
    plain = copy.deepcopy(ours)
    replayed(FusedMixedPrecisionLamb(ours, lr=0.25), ours)
    expected = FusedLAMB(plain, lr=0.25)
    for step in range(1, 5):
        set_grads(plain, step)
        expected.step()
    assert same_bits(ours, plain)


def test_a_step_counted_on_the_host_is_told_apart(device):
    """The recording notices what it is there to notice."""
    ours = make_params(device)
    plain = copy.deepcopy(ours)
    replayed(make("lamb", ours), ours)
    expected = make("lamb", plain)
    for step in range(1, 5):
        set_grads(plain, step)
        expected.step()
    assert not same_bits(ours, plain)


@all_capturable
def test_replays_read_learning_rate_and_flag_anew(kind, device):
    params = make_params(device)
    optimizer = make(kind, params, capturable=True)
    optimizer.found_inf = torch.zeros(1, device=device)
    optimizer.grad_scale = torch.full((1,), 4.0, device=device)
    recording = replayed(optimizer, params, steps=2)
    group = optimizer.param_groups[0]
    assert int(group["step"]) == 2

    optimizer.found_inf.fill_(1.0)
    before = copy.deepcopy((params, optimizer.state_dict()))
    set_grads(params, 3)
    recording.replay()
    assert same_bits(params, before[0])
    assert int(group["step"]) == 2
    after = copy.deepcopy(optimizer.state_dict())
    torch.testing.assert_close(after, before[1], rtol=0, atol=0)

    optimizer.found_inf.zero_()
    group["lr"].zero_()
    recording.replay()
    assert int(group["step"]) == 3
    assert same_bits(params, before[0])
    assert not torch.equal(optimizer.state[params[0]]["exp_avg"], after["state"][0]["exp_avg"])


@all_capturable
def test_scaled_gradients_give_the_same_bits(kind, device):
    """A scale that is a power of two is divided out exactly."""
    ours = make_params(device)
    plain = copy.deepcopy(ours)
    optimizer, expected = make(kind, ours, capturable=True), make(kind, plain)
    optimizer.grad_scale = torch.full((1,), 4.0, device=device)
    for step in range(1, 4):
        set_grads(ours, step)
        set_grads(plain, step)
        torch._foreach_mul_([p.grad for p in ours], 4.0)
        optimizer.step()
        expected.step()
    assert same_bits(ours, plain)


@all_capturable
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "second step"])
def test_grad_scaler_skips_a_step(kind, bad, first, device):
    # On a GPU torch's scaler takes no bfloat16.
    ours = [p for p in make_params(device) if device.type == "cpu" or p.dtype != torch.bfloat16]
    plain = copy.deepcopy(ours)
    optimizer, expected = make(kind, ours, capturable=True), make(kind, plain)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    scaler.scale(torch.zeros(1, device=device))  # as after a backward of a scaled loss
    for step in range(1, 4):
        set_grads(ours, step)
        torch._foreach_mul_([p.grad for p in ours], scaler.get_scale())
        if step == (1 if first else 2):
            ours[1].grad[3] = bad
        else:
            set_grads(plain, step)
            expected.step()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert int(optimizer.param_groups[0]["step"]) == 2
    assert same_bits(ours, plain)


@all_capturable
@pytest.mark.parametrize("saved_capturable", [True, False])
def test_checkpoints_of_the_other_kind_go_on_with_the_same_bits(kind, saved_capturable, device):
    params = make_params(device)
    first = make(kind, params, capturable=saved_capturable)
    for step in (1, 2):
        set_grads(params, step)
        first.step()
    others = copy.deepcopy(params)
    second = make(kind, others, capturable=not saved_capturable)
    second.load_state_dict(first.state_dict())
    for step in (3, 4):
        for optimizer, own in ((first, params), (second, others)):
            set_grads(own, step)
            optimizer.step()
    assert same_bits(params, others)
    assert isinstance(second.param_groups[0]["step"], int if saved_capturable else torch.Tensor)


@all_capturable
def test_copies_stay_capturable(kind, device):
    params = make_params(device)
    optimizer = make(kind, params, capturable=True)
    set_grads(params, 1)
    optimizer.step()
    ours, twin = copy.deepcopy((params, optimizer))
    replayed(twin, ours)
    for step in range(1, 5):
        set_grads(params, step)
        optimizer.step()
    assert same_bits(ours, params)
