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
    "lars": partial(FusedLARS, lr=0.1, momentum=0.9, trust_coefficient=0.5),
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


FORMS = {
    "dtype": lambda t: t.view(torch.bfloat16).flatten()[: t.numel()].view_as(t),
    "part": lambda t: t[:2],
    "strides": lambda t: t.t(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
@all_plain
def test_a_parameter_in_another_form_at_the_same_address_goes_on(make, place, form, device):
    """In a step of several groups, where buckets are kept; compared with one optimizer each."""
    sizes = [(3, 3), (3, 3)]
    params, alone = params_of(device, sizes), params_of(device, sizes)
    optimizer = make([{"params": [p]} for p in params])
    own = [make([p]) for p in alone]
    for seed in range(4):
        step(optimizer, params, (0, 1), seed)
        for index, single in enumerate(own):
            step(single, alone, (index,), seed)
        if seed == 1:
            for changing in (params[place], alone[place]):
                changing.grad = None
                changing.data = form(changing.data)
                if form is FORMS["part"]:
                    single_optimizer = optimizer if changing is params[place] else own[place]
                    single_optimizer.state.pop(changing, None)  # a state has its parameter's shape
    assert_same(params, alone)


@all_modes
def test_empty_parameters_that_change_dtype_go_on(make, device):
    """Their addresses are all 0."""
    params = params_of(device, [3, 0, 0], torch.bfloat16)
    optimizer = make([{"params": [p]} for p in params])
    step(optimizer, params, (0, 1, 2), 0)
    params[1].grad = None
    params[1].data = params[1].data.float()
    before = params[0].detach().clone()
    step(optimizer, params, (0, 1, 2), 1)
    step(optimizer, params, (0, 1, 2), 2)
    assert not torch.equal(params[0], before)


def everything(optimizer, params):
    """Bits of these parameters and their states, and the counts of all groups."""
    found = [p.detach().clone() for p in params]
    for param in params:
        entry = optimizer.state.get(param, {})
        found += [torch.as_tensor(value).clone() for _, value in sorted(entry.items())]
    for group in optimizer.param_groups:
        found += [torch.as_tensor(group.get("step", -1)).clone()]
        found += [v.clone() for v in group.get("exp_avg_sq", ())]
    return found


def assert_same(before, after):
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def wrong_dtype(optimizer, params):
    params[1].grad.data = params[1].grad.data.double()  # torch would refuse to set it


def freed(name):
    def spoil(optimizer, params):
        tensor = getattr(params[1], name) if name else params[1]
        tensor.untyped_storage().resize_(0)

    return spoil


def freed_state(optimizer, params):
    for value in optimizer.state[params[1]].values():
        if value.shape == params[1].shape:
            value.untyped_storage().resize_(0)


def no_number(optimizer, params):
    optimizer.param_groups[1]["lr"] = "0.1"


def no_decay(optimizer, params):
    optimizer.param_groups[1]["weight_decay"] = None


SPOILED = {
    "gradient_of_another_dtype": wrong_dtype,
    "freed_gradient": freed("grad"),
    "freed_parameter": freed(""),
    "freed_state": freed_state,
    "lr": no_number,
    "weight_decay": no_decay,
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
@all_modes
def test_a_step_that_a_later_group_fails_changes_nothing(make, spoil, steps, device):
    params = params_of(device, [4, 3])
    optimizer = make([{"params": [p]} for p in params])
    for seed in range(steps):
        step(optimizer, params, (0, 1), seed)
    if spoil is freed_state and not steps:
        return
    for param in params:
        param.grad = torch.ones_like(param)
    if spoil is no_number and isinstance(optimizer.param_groups[1]["lr"], torch.Tensor):
        spoil = no_decay  # a number in a string is one for torch.as_tensor
    spoil(optimizer, params)
    sound = params[:1] if spoil in (SPOILED["freed_parameter"], freed_state) else params
    before = everything(optimizer, sound)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        optimizer.step()
    assert_same(before, everything(optimizer, sound))
    assert len(optimizer.state) == (len(params) if steps else 0)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@all_modes
def test_gradients_of_another_dtype_are_refused_whatever_was_before(make, dtype, steps, device):
    params = params_of(device, [4])
    optimizer = make(params)
    for seed in range(steps):
        step(optimizer, params, (0,), seed)
    before = everything(optimizer, params)
    params[0].grad = torch.ones(4, device=device)
    params[0].grad.data = torch.ones(4, device=device, dtype=dtype)  # torch would refuse to set it
    with pytest.raises(RuntimeError, match=r"(?s)parameter 0 and its gradient differ.*float32"):
        optimizer.step()
    assert_same(before, everything(optimizer, params))


COUNTING = {k: v for k, v in MODES.items() if k not in ("adagrad", "lars", "sgd")}


@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING.keys())
def test_groups_without_parameters_or_gradients_count_steps(make, device):
    """As on a process of a sharded optimizer that has no part of a group."""
    params = params_of(device, [4, 3])
    optimizer = make([{"params": [params[0]]}, {"params": []}, {"params": [params[1]]}])
    for seed in range(3):
        step(optimizer, params, (0,), seed)
    assert [int(group["step"]) for group in optimizer.param_groups] == [3, 3, 3]

    resumed = make([{"params": [params[0]]}, {"params": []}, {"params": [params[1]]}])
    resumed.load_state_dict(optimizer.state_dict())
    step(resumed, params, (0, 1), 3)
    assert [int(group["step"]) for group in resumed.param_groups] == [4, 4, 4]
    assert [int(resumed.state[p]["step"]) for p in params] == [4, 1]


@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING.keys())
def test_states_of_a_group_saved_where_it_was_empty_are_corrected_rightly(make, device):
    """Groups are saved by one process, states, without counts of their own, by others."""
    params, whole = params_of(device, [4, 3]), params_of(device, [4, 3])
    part = make([{"params": [params[0]]}, {"params": []}])
    full = make([{"params": [whole[0]]}, {"params": [whole[1]]}])
    for seed in range(3):
        step(part, params, (0,), seed)
        step(full, whole, (0, 1), seed)
    saved = full.state_dict()
    for index, group in enumerate(part.state_dict()["param_groups"]):
        kept = saved["param_groups"][index]
        saved["param_groups"][index] = {**kept, "step": group["step"]}
    for entry in saved["state"].values():
        del entry["step"]
    resumed_params = [torch.nn.Parameter(p.detach().clone()) for p in whole]
    resumed = make([{"params": [p]} for p in resumed_params])
    resumed.load_state_dict(saved)
    step(full, whole, (0, 1), 3)
    step(resumed, resumed_params, (0, 1), 3)
    assert all(torch.equal(p, q) for p, q in zip(whole, resumed_params, strict=True))


@all_modes
def test_cpu_parameters_step_under_another_default_device(make):
    """As in code that builds its next model under ``torch.device("meta")``."""
    results = []
    for context in ("cpu", "meta"):
        params = params_of("cpu", [4, 3], torch.bfloat16)
        with torch.device(context):
            optimizer = make([{"params": [p]} for p in params])
            optimizer.add_param_group({"params": []})
            for _ in range(2):
                for param in params:
                    param.grad = torch.ones_like(param)
                optimizer.step()
            resumed = make([{"params": [p]} for p in params])
            resumed.add_param_group({"params": []})
            resumed.load_state_dict(optimizer.state_dict())
            resumed.step()
        results.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))
