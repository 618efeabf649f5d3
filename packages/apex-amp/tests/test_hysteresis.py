"""Hysteresis of the loss scale: it endures some overflows before it falls."""

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state
from apex.amp.scaler import LossScaler

SEQUENCES = ["", "o", "oo", "ooo", "ooooo", "oco", "oocoo", "ococo", "ccoccooocc", "cccccco"]


def formula(overflows, hysteresis, window=3):
    """Megatron-LM's: scale, unskipped and what is left of the hysteresis after each iteration."""
    scale, growth, left = 65536.0, 0, hysteresis
    for found_inf in overflows:
        if found_inf:
            left -= 1
            growth = 0
            if left <= 0:
                scale *= 0.5
        else:
            growth += 1
            if growth == window:
                scale, growth = scale * 2, 0
            left = hysteresis
    return scale, growth


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_scaler(sequence, hysteresis):
    scaler = LossScaler("dynamic", scale_window=3, hysteresis=hysteresis)
    overflows = [letter == "o" for letter in sequence]
    for overflow in overflows:
        grads = [torch.tensor([float("inf") if overflow else 1.0])]
        scaler.clear_overflow_state()
        scaler.unscale(grads, grads, models_are_masters=True)
        assert scaler.update_scale() == overflow  # every overflow skips
    assert (scaler.loss_scale(), scaler._unskipped) == formula(overflows, hysteresis)


def build(**options):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, num_losses=2, verbosity=1, **options)


def overflow(model, optimizer, loss_id=0):
    with amp.scale_loss(model(torch.ones(1, 2)).sum() * float("inf"), optimizer, loss_id) as loss:
        loss.backward()
    optimizer.step()


def scales():
    return [scaler.loss_scale() for scaler in _amp_state.loss_scalers]


def test_initialize(capsys):
    model, optimizer = build(hysteresis=2)
    before = model.weight.clone()
    overflow(model, optimizer, loss_id=1)
    assert scales() == [65536.0, 65536.0]
    assert "loss scaler 1 keeping its loss scale of 65536.0" in capsys.readouterr().out
    overflow(model, optimizer, loss_id=1)
    assert scales() == [65536.0, 32768.0]
    assert "loss scaler 1 reducing loss scale to 32768.0" in capsys.readouterr().out
    assert torch.equal(model.weight, before)


def test_checkpoints():
    model, optimizer = build(hysteresis=3)
    overflow(model, optimizer)
    state = amp.state_dict()
    entry = {"loss_scale": 65536.0, "unskipped": 0}
    assert state["loss_scaler0"] == {**entry, "overflows_left": 2}
    model, optimizer = build(hysteresis=3)
    amp.load_state_dict(state)
    for expected in (65536.0, 32768.0, 16384.0):
        overflow(model, optimizer)
        assert scales()[0] == expected
    # A checkpoint without, as Apex writes it, starts afresh; one with it loads where there is none.
    amp.load_state_dict({"loss_scaler0": entry, "loss_scaler1": entry})
    assert amp.state_dict()["loss_scaler0"]["overflows_left"] == 3
    model, optimizer = build()
    amp.load_state_dict(state)
    assert list(amp.state_dict()["loss_scaler0"]) == ["loss_scale", "unskipped"]
    overflow(model, optimizer)
    assert scales()[0] == 32768.0


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", None])
def test_wrong_values(value):
    with pytest.raises(ValueError, match="hysteresis must be a positive int"):
        amp.initialize(nn.Linear(2, 2), hysteresis=value)
    assert not hasattr(_amp_state, "opt_properties")


@pytest.mark.parametrize("left", [-1, "two", [1]])
def test_wrong_states(left):
    build(hysteresis=2)
    before = amp.state_dict()
    entry = {"loss_scale": 1.0, "unskipped": 0, "overflows_left": left}
    with pytest.raises(ValueError, match="loss_scaler0"):
        amp.load_state_dict({"loss_scaler0": entry, "loss_scaler1": entry})
    assert amp.state_dict() == before
