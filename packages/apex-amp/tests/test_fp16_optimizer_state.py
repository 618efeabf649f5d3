"""Checkpoints of FP16_Optimizer, and what it refuses."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.fp16_utils import FP16_Optimizer, convert_network

MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return convert_network(model, torch.float16)


def build(model=None, make="sgd", **kwargs):
    model = model or network()
    return model, FP16_Optimizer(MAKERS[make](model.parameters()), verbose=False, **kwargs)


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = model[0].weight
    x = torch.randn(16, 8, generator=generator).to(weight)
    y = model[2](model[1](model[0](x).float()).to(weight.dtype))
    return F.mse_loss(y.float(), torch.ones_like(y, dtype=torch.float32))


def train(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, seed))
        optimizer.step()
    return [p.detach().clone() for p in (*model.parameters(), *optimizer.all_fp32_from_fp16_params)]


@pytest.mark.parametrize("make", MAKERS)
def test_resumption_is_bitwise(make):
    model, optimizer = build(make=make, dynamic_loss_scale=True)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, range(3, 6))
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    model, optimizer = build(make=make)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert optimizer.dynamic_loss_scale
    assert optimizer.loss_scaler.dynamic
    assert optimizer.loss_scaler._unskipped == 3
    for a, e in zip(train(model, optimizer, range(3, 6)), expected, strict=True):
        assert torch.equal(a, e)


def test_state_dict_keys_and_older_checkpoints():
    _, optimizer = build(dynamic_loss_scale=True)
    state = optimizer.state_dict()
    assert list(state) == [
        *("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step"),
        *("optimizer_state_dict", "fp32_from_fp16"),
    ]
    optimizer.loss_scaler._unskipped = 9
    older = {**optimizer.state_dict(), "loss_scaler": optimizer.loss_scaler}
    _, fresh = build(dynamic_loss_scale=True)
    fresh.load_state_dict(older)
    assert fresh.loss_scaler._unskipped == 9
    assert fresh.loss_scaler is not optimizer.loss_scaler


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"overflow": None}, "no entry 'overflow'"),
        ({"fp32_from_fp16": [[torch.ones(3)]]}, "shapes"),
        ({"loss_scaler": {"loss_scale": 1.0}}, "loss_scaler must be"),
        ({"loss_scaler": {"loss_scale": -1.0, "unskipped": 0}}, "out of range"),
    ],
)
def test_wrong_states_change_nothing(change, text):
    model, optimizer = build(dynamic_loss_scale=True)
    before = train(model, optimizer, [0])
    state = {**copy.deepcopy(build()[1].state_dict()), **change}
    state = {key: value for key, value in state.items() if value is not None}
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 65536.0
    for a, b in zip(optimizer.all_fp32_from_fp16_params, before[6:], strict=True):
        assert torch.equal(a, b)


def test_refusals():
    model = network()
    with pytest.raises(TypeError, match="init_optimizer must be"):
        FP16_Optimizer(model)
    double = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1).double())], lr=0.1)
    with pytest.raises(TypeError, match=r"param_groups\[0\]\['params'\]\[6\] is torch.float64"):
        FP16_Optimizer(double, verbose=False)
    assert double.param_groups[0]["params"][0] is model[0].weight
    with pytest.raises(ValueError, match="loss_scale"):
        FP16_Optimizer(MAKERS["sgd"](model.parameters()), static_loss_scale=0.0)
    model, optimizer = build()
    for value in (0.0, "inf"):
        with pytest.raises(ValueError, match="loss_scale must be positive"):
            optimizer.loss_scale = value
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises(RuntimeError, match="state_dict"):
        optimizer.__setstate__({})
    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        amp.initialize(nn.Linear(2, 2), optimizer, verbosity=0)


def test_prints_only_if_verbose(capsys):
    build()
    assert capsys.readouterr().out == ""
    FP16_Optimizer(MAKERS["sgd"](network().parameters())).maybe_print("text")
    out = capsys.readouterr().out
    assert "amp.initialize" in out
    assert out.endswith("text\n")
