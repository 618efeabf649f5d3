"""amp.initialize: what comes back, and what is cast."""

import collections
import copy
import inspect
import os

import numpy as np
import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state
from apex.amp._initialize import applier, to_type
from apex.amp.handle import NoOpHandle

half, bfloat16 = torch.float16, torch.bfloat16
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=0.1, **kwargs)


def init(models, optimizers=None, **kwargs):
    return amp.initialize(models, optimizers, **{"verbosity": 0, **kwargs})


class TestReturnShape:
    def test_module(self):
        model = nn.Linear(2, 2)
        assert init(model) is model

    def test_list_of_models(self):
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        assert init(models) is models

    def test_module_and_optimizer(self):
        model = nn.Linear(2, 2)
        optimizer = sgd(model)
        result = init(model, optimizer)
        assert isinstance(result, tuple)
        assert result[0] is model
        assert result[1] is optimizer

    def test_lists(self):
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizers = [sgd(m) for m in models]
        assert init(models, optimizers) == (models, optimizers)

    def test_list_and_optimizer(self):
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizer = sgd(models[0])
        assert init(models, optimizer) == (models, optimizer)

    def test_module_and_list(self):
        model = nn.Linear(2, 2)
        optimizers = [sgd(model)]
        assert init(model, optimizers) == (model, optimizers)

    def test_empty_list_of_optimizers(self):
        model = nn.Linear(2, 2)
        assert init(model, []) == (model, [])

    def test_disabled(self):
        model = nn.Linear(2, 2)
        optimizer = sgd(model)
        forward, step = model.forward, optimizer.step
        assert init(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
        assert (model.forward, optimizer.step) == (forward, step)
        assert model.weight.dtype is torch.float32
        assert not _amp_state.opt_properties.enabled


@pytest.mark.parametrize(
    ("level", "weight", "norm", "output"),
    [
        ("O0", torch.float32, torch.float32, torch.float32),
        ("O1", torch.float32, torch.float32, half),
        ("O2", half, torch.float32, torch.float32),
        ("O3", half, half, torch.float32),
        ("O4", torch.float32, torch.float32, bfloat16),
        ("O5", bfloat16, torch.float32, torch.float32),
    ],
)
def test_dtypes(level, weight, norm, output, device):
    model = init(conv_net().to(device), opt_level=level)
    assert model[0].weight.dtype is weight
    assert {t.dtype for t in (model[1].weight, model[1].running_mean)} == {norm}
    assert model(torch.randn(2, 3, 4, 4, device=device)).dtype is output
    assert (
        model(torch.randn(2, 3, 4, 4, device=device, dtype=torch.float64).float()).dtype is output
    )
    assert {v.dtype for v in model.state_dict().values() if v.is_floating_point()} == {
        torch.float32
    }


@pytest.mark.parametrize("level", LEVELS)
def test_complex_numbers_stay_complex(level):
    model = nn.Linear(4, 2)
    model.register_buffer("rotation", torch.polar(torch.ones(4), torch.arange(4.0)))
    model.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    before = model.rotation.clone(), model.phase.detach().clone()
    model = init(model, opt_level=level)
    assert torch.equal(model.rotation, before[0])
    assert torch.equal(model.phase, before[1])
    assert {model.rotation.dtype, model.phase.dtype} == {torch.complex64}


@pytest.mark.parametrize("enabled", [1, np.True_, 0, np.False_], ids=repr)
def test_booleans_of_other_kinds(enabled):
    model = init(nn.Linear(4, 2), opt_level="O2", enabled=enabled)
    assert model.weight.dtype is (half if enabled else torch.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [half, torch.float64], ids=str)
def test_cast_model_outputs(level, dtype):
    model = init(nn.Linear(4, 2), opt_level=level, cast_model_outputs=dtype)
    assert model(torch.randn(3, 4)).dtype is dtype


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_overrides_reach_the_model(level):
    model, keep = conv_net(), level == "O3"
    model = init(model, opt_level=level, keep_batchnorm_fp32=str(keep))
    assert (model[1].weight.dtype is torch.float32) == keep
    model = init(conv_net(), opt_level=level, cast_model_type=False)
    assert model[0].weight.dtype is torch.float32
    model = init(conv_net(), opt_level=level, cast_model_type=torch.float64)
    assert model[0].weight.dtype is torch.float64


def test_options_are_printed_once_a_call(capsys):
    init(nn.Linear(2, 2), opt_level="O2", verbosity=1, loss_scale="128.0")
    out = capsys.readouterr().out
    assert "O2:" in out
    assert "loss_scale                 : dynamic" in out
    assert "loss_scale                 : 128.0" in out
    init(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    assert capsys.readouterr().out == ""


def test_num_losses_and_bounds():
    init(nn.Linear(2, 2), num_losses=3, min_loss_scale=2.0, max_loss_scale=1024.0)
    scalers = _amp_state.loss_scalers
    assert len({id(s) for s in scalers}) == 3
    assert [s.loss_scale() for s in scalers] == [1024.0] * 3
    assert (_amp_state.min_loss_scale, _amp_state.max_loss_scale) == (2.0, 1024.0)


@pytest.mark.parametrize("level", LEVELS)
def test_there_is_always_a_handle(level):
    init(nn.Linear(2, 2), opt_level=level)
    handle = _amp_state.handle
    assert handle.is_active() == (level in ("O1", "O4"))
    assert isinstance(handle, NoOpHandle) == (level not in ("O1", "O4"))
    assert ("APEX_AMP_ENABLED" in os.environ) == (level != "O0")
    handle._deactivate()
    handle._deactivate()
    assert not handle.is_active()
    assert "APEX_AMP_ENABLED" not in os.environ


def test_incoming_half_model_is_allowed_on_request():
    _amp_state.allow_incoming_model_not_fp32 = True
    model = init(nn.Linear(4, 2).half(), opt_level="O2", cast_model_type=False)
    assert model.weight.dtype is half


def test_positional_order_is_that_of_nvidia():
    names = list(inspect.signature(amp.initialize).parameters)
    assert names[:8] == [
        *("models", "optimizers", "enabled", "opt_level", "cast_model_type"),
        *("patch_torch_functions", "keep_batchnorm_fp32", "master_weights"),
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_copies_call_their_own_forward(level):
    model = init(nn.Linear(4, 2), opt_level=level, cast_model_outputs=torch.float32)
    x = torch.randn(3, 4)
    twin = copy.deepcopy(model)
    replica = model._replicate_for_data_parallel()
    replica._parameters = {
        k: nn.Parameter(torch.zeros_like(p)) for k, p in model._parameters.items()
    }
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    assert twin(x).abs().sum() == 0
    assert replica(x).abs().sum() == 0
    assert model(x).abs().sum() > 0
    assert model.forward(x).equal(model(x))


def test_signature_of_forward_is_kept():
    class Model(nn.Module):
        def forward(self, pixels, labels=None):
            return pixels

    model = init(Model(), opt_level="O2")
    assert list(inspect.signature(model.forward).parameters) == ["pixels", "labels"]


@pytest.mark.parametrize("level", LEVELS)
def test_initialized_again_in_another_level(level):
    model = init(nn.Linear(4, 2), opt_level="O1")
    model = init(model, opt_level=level)
    expected = {"O1": half, "O4": bfloat16}.get(level, torch.float32)
    assert model(torch.randn(3, 4)).dtype is expected


class Output(collections.OrderedDict):
    """As the outputs of some libraries: items are attributes, too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


Pair = collections.namedtuple("Pair", "left right")


def test_applier_keeps_containers():
    x, n = torch.ones(2), torch.ones(2, dtype=torch.int64)
    cast = lambda t: to_type(half, t)
    output = Output(loss=x)
    cases = [
        *([x], (x, n), Pair(x, "text"), {"a": [x], 3: n}, collections.deque([x]), output),
        collections.defaultdict(list, a=[x]),
    ]
    for value in cases:
        assert type(applier(value, cast)) is type(value)
    assert applier(Pair(x, "text"), cast).left.dtype is half
    assert applier({"a": [x], 3: n}, cast)["a"][0].dtype is half
    assert applier({"a": [x], 3: n}, cast)[3].dtype is torch.int64
    assert applier(output, cast).loss.dtype is half
    assert output.loss.dtype is torch.float32
    assert [t.dtype for t in applier(iter([x, n]), cast)] == [half, torch.int64]
    module, array = nn.Linear(1, 1), x.numpy()
    for value in (module, array, "text", b"bytes", range(3), None, 1.5, torch.float32):
        assert applier(value, cast) is value
    assert module.weight.dtype is torch.float32
    packed = nn.utils.rnn.pack_sequence([x, x])
    assert applier(packed, cast).data.dtype is half


class Batch(collections.abc.MutableMapping):
    """A mapping whose copy has the same items."""

    def __init__(self, **items):
        self.store = items

    def __getitem__(self, key):
        return self.store[key]

    def __setitem__(self, key, value):
        self.store[key] = value

    def __delitem__(self, key):
        del self.store[key]

    def __iter__(self):
        return iter(self.store)

    def __len__(self):
        return len(self.store)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.UserDict, Batch])
def test_the_callers_batch_stays_as_it_is(kind, level):
    seen = []

    class Model(nn.Linear):
        def forward(self, batch):
            seen.append(type(batch))
            return super().forward(batch["x"])

    model, x = init(Model(4, 2), opt_level=level), torch.randn(3, 4)
    batch = kind(x=x)
    model(batch)
    assert batch["x"] is x
    assert x.dtype is torch.float32
    assert seen == [dict if kind is Batch and level not in ("O1", "O4") else kind]
