"""A step that fails between its launches: nothing runs twice, and no state is left half made."""

from types import SimpleNamespace

import numpy
import pytest
import torch

from apex import optimizers
from apex_testkit.optimizer_models import everything

KINDS = {
    "FusedAdam": {},
    "FusedLAMB": {},
    "FusedNovoGrad": {},
    "FusedAdagrad": {},
    "FusedSGD": {"momentum": 0.9},
    "FusedLARS": {"momentum": 0.9},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def make(kind, dtypes=(torch.float32,), device="cpu"):
    params = [torch.nn.Parameter(torch.ones(3, 4, dtype=d, device=device)) for d in dtypes]
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    return params, getattr(optimizers, kind)(params, lr=0.1, **KINDS[kind])


def replace_operator(monkeypatch, kind, wrap):
    step = getattr(optimizers, kind).op
    monkeypatch.setattr(step, "launch", wrap(step.launch))


@pytest.mark.parametrize("moved", [False, True], ids=["same_memory", "other_memory"])
def test_an_error_after_the_launch_is_not_answered_by_another(kind, moved, monkeypatch, device):
    """The device may be lost by then; what was written must not be written once more."""
    (expected,), reference = make(kind, device=device)
    (param,), optimizer = make(kind, device=device)
    for _ in range(2):
        reference.step()
        optimizer.step()
    reference.step()

    def failing(operator):
        def run(*args):
            operator(*args)
            raise RuntimeError("the device is lost")

        return run

    replace_operator(monkeypatch, kind, failing)
    if moved:
        param.data = param.data.clone()
    with pytest.raises(RuntimeError, match="the device is lost"):
        optimizer.step()
    assert torch.equal(param, expected)


def test_states_of_launches_that_did_not_run_are_taken_back(kind, monkeypatch, device):
    params, optimizer = make(kind, (torch.float32, torch.float64), device)
    calls = []

    def failing(operator):
        def run(*args):
            calls.append(args)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            operator(*args)

        return run

    replace_operator(monkeypatch, kind, failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    has_run = [bool(param.detach().ne(1).any()) for param in params]
    assert sorted(has_run) == [False, True]
    assert [param in optimizer.state for param in params] == has_run
    optimizer.step()
    assert all(param.detach().ne(1).any() for param in params)


def test_parameters_that_join_later_share_a_launch_from_their_second_step_on(monkeypatch, device):
    params, optimizer = make("FusedSGD", (torch.float32,) * 3, device)
    calls = []

    def counting(operator):
        return lambda *args: calls.append(len(args[0])) or operator(*args)

    replace_operator(monkeypatch, "FusedSGD", counting)
    params[1].grad = None
    optimizer.step()
    params[1].grad = torch.ones_like(params[1])
    for _ in range(3):
        optimizer.step()
    assert calls == [2, 2, 1, 3, 3]


NAN, HUGE = float("nan"), 10**400
BAD_NUMBERS = {
    "betas": [(0.9, 1.0), [0.9, 2.0], (NAN, 0.9), (0.9, HUGE), (-0.1, 0.9), 0.9],
    "eps": [-1.0, NAN, HUGE],
    "momentum": [-1.0, NAN, HUGE],
    "lr": [HUGE, torch.tensor(1j)],
    **{key: [HUGE] for key in ("weight_decay", "dampening", "trust_coefficient", "max_grad_norm")},
}
ADAM = ("lr", "betas", "eps", "weight_decay")
NUMBERS = {
    "FusedAdam": ADAM,
    "float8": ADAM,
    "bfloat16": ADAM,
    "capturable": ADAM[1:],
    "FusedLAMB": (*ADAM, "max_grad_norm"),
    "FusedMixedPrecisionLamb": (*ADAM[1:], "max_grad_norm"),
    "FusedNovoGrad": ADAM,
    "FusedAdagrad": ("lr", "eps", "weight_decay"),
    "FusedSGD": ("lr", "momentum", "weight_decay", "dampening"),
    "FusedLARS": ("lr", "momentum", "weight_decay", "eps", "trust_coefficient"),
}
OPTIONS = {
    "float8": {"exp_avg_dtype": torch.uint8},
    "bfloat16": {"exp_avg_dtype": torch.bfloat16},
    "capturable": {"capturable": True},
    "FusedSGD": {"momentum": 0.9},
    "FusedLARS": {"momentum": 0.9},
}
BAD = [(m, n, value) for m, names in NUMBERS.items() for n in names for value in BAD_NUMBERS[n]]


@pytest.mark.parametrize(("mode", "name", "value"), BAD, ids=lambda v: str(v)[:23])
def test_a_number_of_the_last_group_is_refused_before_the_first_is_stepped(
    mode, name, value, device
):
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(3)]
    make = getattr(optimizers, mode, optimizers.FusedAdam)
    optimizer = make([{"params": [p]} for p in params], lr=0.1, **OPTIONS.get(mode, {}))
    group = optimizer.param_groups[2]
    for warm in (False, True):
        before, kept = everything(optimizer, params), group[name]
        group[name] = value
        for param in params:
            param.grad = torch.ones_like(param)
        with pytest.raises((RuntimeError, OverflowError, ValueError)):
            optimizer.step()
        group[name], after = kept, everything(optimizer, params)
        assert before.keys() == after.keys()
        assert all(torch.equal(own, after[key]) for key, own in before.items()), warm
        optimizer.step()


FLAGS = {
    "FusedAdam": ("bias_correction", "maximize"),
    "float8": ("bias_correction", "maximize"),
    "capturable": ("bias_correction", "maximize"),
    "FusedLAMB": ("bias_correction", "grad_averaging", "maximize"),
    "FusedMixedPrecisionLamb": ("bias_correction", "grad_averaging", "maximize"),
    "FusedNovoGrad": ("bias_correction", "grad_averaging", "maximize", "init_zero"),
    "FusedAdagrad": ("maximize",),
    "FusedSGD": ("nesterov", "maximize"),
    "FusedLARS": ("nesterov", "maximize", "is_skipped"),
}
AMBIGUOUS = [(m, n, torch.ones(2)) for m, names in FLAGS.items() for n in names]
MISSING = [(m, n, None) for m, names in FLAGS.items() for n in (*names, *NUMBERS[m])]


@pytest.mark.parametrize(
    ("mode", "name", "value"), MISSING + AMBIGUOUS, ids=lambda v: str(v).replace(" ", "")
)
def test_an_option_of_the_last_group_that_is_missing_or_unclear_changes_nothing(
    mode, name, value, device
):
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(3)]
    make = getattr(optimizers, mode, optimizers.FusedAdam)
    optimizer = make([{"params": [p]} for p in params], lr=0.1, **OPTIONS.get(mode, {}))
    group = optimizer.param_groups[2]
    for warm in (False, True):
        before, kept = everything(optimizer, params), group.pop(name)
        if value is not None:
            group[name] = value
        for param in params:
            param.grad = torch.ones_like(param)
        with pytest.raises((KeyError, RuntimeError), match=f"{name}|ambiguous"):
            optimizer.step()
        group[name], after = kept, everything(optimizer, params)
        assert before.keys() == after.keys()
        assert all(torch.equal(own, after[key]) for key, own in before.items()), warm
        optimizer.step()


def test_numbers_of_other_types_do_not_bring_a_group_before_one_that_is_refused(device):
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    optimizer = optimizers.FusedAdam([{"params": [p]} for p in params], lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    first, last = optimizer.param_groups
    first["betas"], first["weight_decay"], last["eps"] = [0.8, 0.9], numpy.float32(0.1), -1.0
    last["weight_decay"] = numpy.float32(0.1)
    with pytest.raises(RuntimeError, match="eps"):
        optimizer.step()
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)
    last["eps"] = 1e-8
    optimizer.step()
    assert not any(torch.equal(p, torch.ones_like(p)) for p in params)


def test_what_users_keep_in_groups_is_not_taken_for_a_number_of_the_step(kind, device):
    (expected,), reference = make(kind, device=device)
    (param,), optimizer = make(kind, device=device)
    taken = {name for _, name in optimizer.op.numbers} | {"beta1", "found_inf", "device_step"}
    own = dict.fromkeys(taken - set(optimizer.defaults) - {"step"}, "mine")
    optimizer.param_groups[0].update(own)
    for _ in range(2):
        reference.step()
        optimizer.step()
    assert torch.equal(param, expected)
    assert {name: optimizer.param_groups[0][name] for name in own} == own


@pytest.mark.parametrize("make", [getattr(optimizers, n) for n in optimizers.__all__])
def test_a_module_has_parameters(make):
    with pytest.raises(TypeError, match=r"params is a Linear; pass its parameters: model\.param"):
        make(torch.nn.Linear(2, 2), lr=0.1)
    listed = torch.nn.ParameterList(torch.nn.Linear(2, 2).parameters())
    assert make(listed, lr=0.1).param_groups[0]["params"] == list(listed)


@pytest.mark.parametrize("kind", ["FusedSGD", "FusedLARS"], indirect=True)
def test_a_buffer_of_none_is_a_missing_one(kind, device):
    """So torch.optim.SGD says that a parameter's first step is to come."""
    (expected,), fresh = make(kind, device=device)
    (param,), optimizer = make(kind, device=device)
    optimizer.step()
    with torch.no_grad():
        param.fill_(1)
    optimizer.state[param]["momentum_buffer"] = None
    fresh.step()
    optimizer.step()
    assert torch.equal(param, expected)
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = None
    optimizer.load_state_dict(saved)
    assert optimizer.state[param].get("momentum_buffer") is None
    optimizer.step()
    fresh.state.clear()
    fresh.step()
    assert torch.equal(param, expected)


def test_copies_of_another_layout_are_refused_by_the_operators_own_words(device):
    """Once and for all: a new division would not help."""
    model = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float16, device=device))
    master = torch.nn.Parameter(model.detach().float())
    optimizer = optimizers.FusedSGD([master], lr=0.1, momentum=0.9)
    optimizer._amp_stash = SimpleNamespace(fp32_from_fp16_groups=[[master]], fp16_groups=[[model]])
    master.grad = torch.ones_like(master)
    optimizer.step()
    value, buffer = master.detach().clone(), optimizer.state[master]["momentum_buffer"].clone()
    model.data = model.data.t()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sgd_step: a tensor was not contiguous"):
            optimizer.step()
    assert torch.equal(master, value)
    assert torch.equal(optimizer.state[master]["momentum_buffer"], buffer)
    model.data = model.data.t()
    optimizer.step()
    assert torch.equal(model, master.half())
