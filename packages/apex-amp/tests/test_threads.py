"""What threads share in amp: functions replaced in torch, the options, the list of optimizers."""

import contextlib
import functools
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import amp as casts
from apex.amp import frontend
from apex.amp._amp_state import _amp_state
from apex.amp.masters import owners
from apex_testkit.threads import together


def train(model, optimizer, loss_id):
    """Train one of the models that amp knows; return losses and all values of parameters."""
    generator = torch.Generator().manual_seed(loss_id)
    losses = []
    for _ in range(10):
        x = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), x)
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.detach())
    masters = [param.detach() for param in amp.master_params(optimizer)]
    return [*losses, *masters, *model.state_dict().values()]


def trainings(opt_level):
    """Functions that train a model each, of which amp knows both."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.125, momentum=0.9) for m in models]
    options = {"opt_level": opt_level, "num_losses": 2, "verbosity": 0}
    both = zip(*amp.initialize(models, optimizers, **options), strict=True)
    return [functools.partial(train, *one, loss_id) for loss_id, one in enumerate(both)]


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O4", "O5"])
def test_two_models_in_two_threads(opt_level):
    """They get the bits that they get one after the other."""
    expected = [function() for function in trainings(opt_level)]
    found = together(*trainings(opt_level))
    for of_one, of_thread in zip(expected, found, strict=True):
        assert len(of_one) == len(of_thread)
        assert all(map(torch.equal, of_one, of_thread))
    assert not torch.equal(expected[0][0], expected[1][0])


def functions():
    """All functions of the modules in which amp replaces some."""
    modules = (torch, torch.Tensor, F, torch.autograd, torch.autograd.graph)
    return {
        (module.__name__, name): value
        for module in modules
        for name, value in vars(module).items()
        if callable(value)
    }


def test_casts_that_threads_switch_on_at_once_end(monkeypatch):
    """Else a thread would take for torch's own what another has put there, and restore that."""
    before = functions()
    cast_functions = casts.cast_functions

    def slowly(*args, **kwargs):
        time.sleep(0.05)  # amid the changes of one thread, the others run
        return cast_functions(*args, **kwargs)

    monkeypatch.setattr(casts, "cast_functions", slowly)
    start = functools.partial(amp.init, patch_type=torch.bfloat16, device_types=("cpu",))
    together(*[start] * 4)
    assert functions() != before
    _amp_state.handle._deactivate()
    assert functions() == before


def test_a_refused_initialization_leaves_a_training_alone():
    """It restores amp's state, of which a training in another thread misses nothing meanwhile."""
    amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)

    def refused():
        for _ in range(20_000):
            with contextlib.suppress(RuntimeError), frontend._unchanged_on_error():
                raise RuntimeError("unknown opt_level")

    def ask():
        return all(hasattr(_amp_state, "handle") for _ in range(300_000))

    assert together(refused, refused, ask)[2]


class SlowSet(weakref.WeakSet):
    """Other threads run between its elements."""

    def __iter__(self):
        for element in super().__iter__():
            time.sleep(0.001)
            yield element


class Optimizer:
    """What amp asks of one that it has initialized."""

    def __init__(self):
        self.param_groups = [{"params": [torch.zeros(1)]}]
        self._amp_stash = self
        self.all_fp16_params, self.has_masters = [], True


def test_optimizers_come_while_others_are_listed(monkeypatch):
    kept = [Optimizer() for _ in range(20)]
    monkeypatch.setattr(owners, "_LIVE", SlowSet(kept))

    def add():
        for _ in range(20):
            kept.append(Optimizer())
            owners.note_owner(kept[-1])

    def look():
        owners.check_has_no_owner("here", [torch.zeros(1)], True, besides=None)

    together(look, add, look)
    assert len(owners._LIVE) == 40
