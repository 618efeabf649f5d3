"""Truncated and foreign checkpoints: a clear error, and the run goes on as if nothing had been."""

import copy
import importlib.util
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-4)  # 1e-8 is 0 in float16


def build(level, width=8, make=adam):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, width))
    optimizer = make(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.randn(5, 4)), torch.randn(5, model[-1].out_features))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def states(model, optimizer):
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
    }


def load(path, model, optimizer):
    """As in docs/examples/imagenet/checkpoint.py: all three parts, or none."""
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # OSError, EOFError, RuntimeError: it depends on where it was cut
        raise ValueError(f"{path} is not a checkpoint, or not a whole one: {error}") from error
    before = copy.deepcopy(states(model, optimizer))
    parts = {"model": model, "optimizer": optimizer, "amp": amp}
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except Exception:
        for name, part in parts.items():
            part.load_state_dict(before[name])
        raise


def trained_state(level, width):
    model, optimizer = build(level, width)
    train(model, optimizer, range(2))
    return optimizer.state_dict()


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


# What is in the file, the error, and what its text names.
FOREIGN = {
    "another model": (
        lambda level, state: states(*build(level, width=7)),
        RuntimeError,
        "2.weight",
    ),
    "another optimizer": (
        lambda level, state: {**state, "optimizer": {"state": {}, "param_groups": []}},
        ValueError,
        "parameter group",
    ),
    "SGD": (
        lambda level, state: states(*build(level, make=lambda p: torch.optim.SGD(p, momentum=0.9))),
        ValueError,
        r"Adam.load_state_dict: param_groups\[0\] has the options \[momentum\], expected \[betas\]",
    ),
    "another model's optimizer": (
        lambda level, state: {**state, "optimizer": trained_state(level, width=7)},
        ValueError,
        r"exp_avg of .*\[4\] has shape \[7, 6\], but the parameter \[8, 6\]",
    ),
    "no amp": (
        lambda level, state: {k: v for k, v in state.items() if k != "amp"},
        KeyError,
        "amp",
    ),
    "GradScaler": (
        lambda level, state: {**state, "amp": torch.amp.GradScaler("cpu").state_dict()},
        RuntimeError,
        "growth_factor",
    ),
    "NaN scale": (
        lambda level, state: {
            **state,
            "amp": {"loss_scaler0": {"loss_scale": float("nan"), "unskipped": 0}},
        },
        ValueError,
        "loss_scaler0",
    ),
}


def check_refused(level, path, data, error, text):
    """``data(state)`` are the bytes of the file."""
    expected_model, expected_optimizer = build(level)
    train(expected_model, expected_optimizer, range(6))
    expected = copy.deepcopy(states(expected_model, expected_optimizer))

    model, optimizer = build(level)
    train(model, optimizer, range(3))
    scalers = copy.deepcopy(amp.state_dict())
    path.write_bytes(data(states(model, optimizer)))
    # Building another model initializes amp anew: this run's scalers are in force again.
    amp.load_state_dict(scalers)
    with pytest.raises(error, match=text):
        load(path, model, optimizer)
    train(model, optimizer, range(3, 6))
    actual = states(model, optimizer)
    assert actual["amp"] == expected["amp"]
    for name, value in expected["model"].items():
        assert torch.equal(actual["model"][name], value), name
    for index, entries in expected["optimizer"]["state"].items():
        for name, value in entries.items():
            assert torch.equal(actual["optimizer"]["state"][index][name], value), (index, name)


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("level", LEVELS)
def test_foreign_checkpoints_change_nothing(level, case, tmp_path):
    change, error, text = FOREIGN[case]
    check_refused(
        level, tmp_path / "checkpoint.pt", lambda state: saved(change(level, state)), error, text
    )


OPTIMIZERS = {
    "Adam": adam,
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-4),
}
if importlib.util.find_spec("apex.optimizers"):
    from apex.optimizers import FusedAdam, FusedSGD

    OPTIMIZERS |= {
        "FusedAdam": lambda p: FusedAdam(p, lr=0.01, eps=1e-4),
        "FusedSGD": lambda p: FusedSGD(p, lr=0.01, momentum=0.9),
    }


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_optimizer_refuses_by_itself(level, name, trained):
    """Without the care of load(): the optimizer steps on as if nothing had been."""
    foreign = []
    for other in OPTIMIZERS:
        model, optimizer = build(level, make=OPTIMIZERS[other])
        train(model, optimizer, range(3) if trained else ())
        if ("SGD" in name) is not ("SGD" in other):  # others may be alike
            foreign.append(copy.deepcopy(optimizer.state_dict()))
    if trained:
        model, optimizer = build(level, width=7, make=OPTIMIZERS[name])
        train(model, optimizer, range(3))
        foreign.append(copy.deepcopy(optimizer.state_dict()))

    results = []
    for refused in ([], foreign):
        model, optimizer = build(level, make=OPTIMIZERS[name])
        model[0].weight.requires_grad_(False)  # masters leave it out for now
        train(model, optimizer, range(3))
        for state in refused:
            with pytest.raises(
                ValueError, match=f"{name}.load_state_dict.* (seems to be|is of another)"
            ):
                optimizer.load_state_dict(state)
        model[0].weight.requires_grad_()
        train(model, optimizer, range(3, 6))
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_truncated_checkpoints_change_nothing(level, fraction, tmp_path):
    def truncated(state):
        data = saved(state)
        return data[: int(fraction * len(data))]

    path = tmp_path / "checkpoint.pt"
    check_refused(level, path, truncated, ValueError, "not a whole one")
