"""Checkpoints: the layout, exact resumption, and what is refused."""

import collections
import copy
import io

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-4),  # 1e-8 is 0 in float16
}
DATA = torch.Generator().manual_seed(1)
BATCHES = [(torch.randn(8, 3, 6, 6, generator=DATA), torch.arange(8) % 4) for _ in range(8)]


def build(level, kind, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
        nn.Linear(128, 4),
    )
    optimizer = OPTIMIZERS[kind](model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def train(model, optimizer, batches):
    losses = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved(model, optimizer):
    file = io.BytesIO()
    parts = {"model": model, "optimizer": optimizer, "amp": amp}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ORDERS = [("model", "optimizer", "amp"), ("amp", "optimizer", "model")]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_resumption_is_bitwise(level, kind, order):
    model, optimizer = build(level, kind)
    train(model, optimizer, BATCHES[:4])
    checkpoint = saved(model, optimizer)
    expected = train(model, optimizer, BATCHES[4:])
    state = {k: v.clone() for k, v in model.state_dict().items()}
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]

    model, optimizer = build(level, kind, seed=99)
    parts = {"model": model, "optimizer": optimizer, "amp": amp}
    for name in order:
        parts[name].load_state_dict(checkpoint[name])
    assert train(model, optimizer, BATCHES[4:]) == expected
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for actual, master in zip(amp.master_params(optimizer), masters, strict=True):
        assert torch.equal(actual, master)


@pytest.mark.parametrize("level", LEVELS)
def test_model_checkpoints_are_float32_and_fit_every_level(level):
    model, optimizer = build(level, "sgd")
    train(model, optimizer, BATCHES[:2])
    state = model.state_dict()
    part = model[0].state_dict()
    dtypes = {v.dtype for v in (*state.values(), *part.values()) if v.is_floating_point()}
    assert dtypes == {torch.float32}
    if level in ("O2", "O5"):  # the masters' values, not their roundings
        weight = next(iter(amp.master_params(optimizer)))
        assert torch.equal(state["0.weight"], weight)
        assert torch.equal(part["weight"], weight)
        assert not torch.equal(weight, model[0].weight.float())
    before = state["0.weight"].clone()
    train(model, optimizer, BATCHES[2:3])
    assert torch.equal(state["0.weight"], before) == (level not in ("O0", "O1", "O4"))
    build("O0", "sgd")[0].load_state_dict(state)


def test_weights_loaded_during_training_reach_the_masters():
    model, optimizer = build("O2", "sgd")
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer, BATCHES[:2])
    model.load_state_dict(best)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, BATCHES[:1])
    assert torch.equal(model.state_dict()["0.weight"], best["0.weight"])


def test_weights_changed_by_hand_are_what_is_saved():
    model, optimizer = build("O2", "sgd")
    train(model, optimizer, BATCHES[:1])
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    assert torch.equal(model.state_dict()["0.weight"], torch.full((8, 3, 3, 3), 0.5))


def test_layout():
    amp.initialize(nn.Linear(2, 2), num_losses=2, verbosity=0)
    _amp_state.loss_scalers[1]._loss_scale = 4.0
    _amp_state.loss_scalers[1]._unskipped = 7
    expected = [
        ("loss_scaler0", {"loss_scale": 65536.0, "unskipped": 0}),
        ("loss_scaler1", {"loss_scale": 4.0, "unskipped": 7}),
    ]
    assert list(amp.state_dict().items()) == expected
    destination = collections.OrderedDict(first=1)
    assert amp.state_dict(destination) is destination
    assert list(destination.items()) == [("first", 1), *expected]


def test_entries_go_by_their_number():
    amp.initialize(nn.Linear(2, 2), num_losses=2, verbosity=0)
    state = amp.state_dict()
    state["loss_scaler1"]["loss_scale"] = 2.0
    amp.load_state_dict(dict(reversed(state.items())))
    assert [s.loss_scale() for s in _amp_state.loss_scalers] == [65536.0, 2.0]


def test_another_number_of_losses(capsys):
    amp.initialize(nn.Linear(2, 2), num_losses=3, verbosity=0)
    state = amp.state_dict()
    state["loss_scaler0"]["unskipped"] = 5
    amp.initialize(nn.Linear(2, 2), num_losses=1, verbosity=1)
    capsys.readouterr()
    amp.load_state_dict(state)
    out = capsys.readouterr().out
    assert "3 loss scalers" in out
    assert "ignoring loss_scaler1" in out
    assert "ignoring loss_scaler2" in out
    assert _amp_state.loss_scalers[0]._unskipped == 5


GOOD = {"loss_scale": 2.0, "unskipped": 1}


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ({"loss_scaler0": GOOD, "model": {}}, RuntimeError, "'model'"),
        ({"loss_scaler0": GOOD, "loss_scaler_x": GOOD}, RuntimeError, "loss_scaler_x"),
        ({"loss_scaler0": GOOD, 3: GOOD}, RuntimeError, "3"),
        ({"loss_scaler0": GOOD, "loss_scaler1": {"loss_scale": 1.0}}, ValueError, "loss_scaler1"),
        ({"loss_scaler0": GOOD, "loss_scaler1": 4.0}, ValueError, "loss_scaler1"),
        ({"loss_scaler0": GOOD, "loss_scaler1": {**GOOD, "loss_scale": 0}}, ValueError, "range"),
        ({"loss_scaler0": GOOD, "loss_scaler1": {**GOOD, "unskipped": -1}}, ValueError, "range"),
    ],
    ids=str,
)
def test_wrong_states_change_nothing(state, error, text):
    amp.initialize(nn.Linear(2, 2), num_losses=2, verbosity=0)
    before = copy.deepcopy(amp.state_dict())
    with pytest.raises(error, match=text):
        amp.load_state_dict(state)
    assert amp.state_dict() == before


def test_when_amp_is_not_enabled(capsys):
    assert amp.state_dict() == {}
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    state = amp.state_dict()
    amp.initialize(nn.Linear(2, 2), enabled=False)
    assert amp.state_dict() == {}
    amp.load_state_dict(state)
    assert "ignoring loss_scaler0" in capsys.readouterr().out
    amp.load_state_dict({})


def test_a_whole_model_can_be_pickled():
    model, optimizer = build("O2", "sgd")
    train(model, optimizer, BATCHES[:1])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    x = BATCHES[0][0]
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        model[4].weight.zero_()
    assert not torch.equal(twin(x), model(x))


@pytest.mark.parametrize("level", LEVELS)
def test_a_pickled_model_works_where_amp_was_never_called(level):
    model, _ = build(level, "sgd")
    file = io.BytesIO()
    torch.save(model.eval(), file)
    file.seek(0)
    _amp_state.handle._deactivate()
    expected = model(BATCHES[0][0])
    _amp_state.__dict__.clear()
    twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(BATCHES[0][0]), expected)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("options", [{"opt_level": "O3"}, {"master_weights": False}], ids=str)
def test_nothing_is_kept_beside_weights_that_never_have_masters(options, assign):
    model = nn.Linear(4, 4)
    state = copy.deepcopy(model.state_dict())
    model = amp.initialize(model, **{"opt_level": "O2", "verbosity": 0, **options})
    model.load_state_dict(state, assign=assign)
    assert vars(model.weight) == {}
    assert model.weight.dtype is torch.float16
    assert torch.equal(model.state_dict()["weight"], state["weight"].half().float())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_values_that_were_loaded_go_with_a_change_by_hand(level):
    model = nn.Linear(4, 4)
    state = copy.deepcopy(model.state_dict())
    model = amp.initialize(model, opt_level=level, verbosity=0)
    model.load_state_dict(state)
    assert torch.equal(model.state_dict()["weight"], state["weight"])
    with torch.no_grad():
        model.weight.fill_(0.5)
    assert torch.equal(model.state_dict()["weight"], torch.full((4, 4), 0.5))
    assert vars(model.weight) == {}


def test_state_dict_is_an_attribute_of_the_module():
    assert "state_dict" in amp.__dict__
    assert callable(amp.__dict__["load_state_dict"])
