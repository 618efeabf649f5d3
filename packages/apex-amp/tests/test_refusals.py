"""What amp.initialize refuses, and that it changes nothing then."""

import types

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state

half, bfloat16 = torch.float16, torch.bfloat16


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=0.1, **kwargs)


def init(models, optimizers=None, **kwargs):
    return amp.initialize(models, optimizers, **{"verbosity": 0, **kwargs})


def bad_model(**dtypes):
    model = nn.BatchNorm1d(2)
    for name, dtype in dtypes.items():
        getattr(model, name).data = getattr(model, name).data.to(dtype)
    return model


class Wrapper:
    """As Lightning's and Accelerate's, which are no torch optimizers."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def wrapped_in_data_parallel():
    return nn.DataParallel(nn.Linear(2, 2))


def apex_ddp(monkeypatch):
    """A model of the sibling wheel's class, whether or not that wheel is installed."""
    module = types.ModuleType("apex.parallel.distributed")
    module.DistributedDataParallel = type("DistributedDataParallel", (nn.Linear,), {})
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    return module.DistributedDataParallel(2, 2)


REFUSED = [
    (lambda m, o: init("model"), TypeError, "models must be"),
    (lambda m, o: init([m, 3]), TypeError, "int at index 1"),
    (lambda m, o: init(m, "adam"), TypeError, "optimizers"),
    (lambda m, o: init(m, Wrapper(o)), TypeError, r"It wraps a SGD: pass its `\.optimizer`"),
    (lambda m, o: init(m, [o, Wrapper(sgd(m))]), TypeError, r"optimizers\[1\].*pass its `\.opt"),
    (lambda m, o: init(m, [o, m]), TypeError, r"optimizers\[1\]"),
    (lambda m, o: init(m, [o, o]), RuntimeError, "twice"),
    (lambda m, o: init(m, [o, sgd(m)], opt_level="O2"), RuntimeError, r"also in optimizers\[0\]"),
    (lambda m, o: init(m, o, opt_level="02"), RuntimeError, "letter O"),
    (lambda m, o: amp.initialize(m, o, "O2"), TypeError, "enabled must be .* got 'O2'"),
    (lambda m, o: init(m, o, enabled=None), TypeError, "enabled must be"),
    (lambda m, o: init(m, o, opt_level=2), RuntimeError, "unknown opt_level 2"),
    (lambda m, o: init(m, o, opt_level=[]), RuntimeError, "unknown opt_level"),
    (lambda m, o: init(m, o, opt_level="O1", master_weights=True), RuntimeError, "master_weights"),
    (lambda m, o: init(m, o, opt_level="O2", patch_torch_functions=True), RuntimeError, "patch"),
    (lambda m, o: init(m, o, loss_scale="big"), ValueError, "big"),
    (lambda m, o: init(m, o, loss_scale=0.0), ValueError, "loss_scale must be positive"),
    (lambda m, o: init(m, o, min_loss_scale=8.0, max_loss_scale=4.0), ValueError, "min_loss_scale"),
    (lambda m, o: init(m, o, num_losses=-1), ValueError, "num_losses"),
    (lambda m, o: init(m, o, cast_model_outputs="half"), TypeError, "cast_model_outputs"),
    (lambda m, o: init(bad_model(weight=half), o), RuntimeError, "parameter weight"),
    (lambda m, o: init(bad_model(bias=torch.float64), o), RuntimeError, "parameter bias"),
    (
        lambda m, o: init(m.double(), o),
        RuntimeError,
        r"no level for torch\.float64: call model\.fl",
    ),
    (lambda m, o: init(bad_model(running_var=bfloat16), o), RuntimeError, "buffer running_var"),
    (lambda m, o: init(wrapped_in_data_parallel(), o), RuntimeError, "DataParallel"),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
@pytest.mark.parametrize("earlier", [None, "O1", "O2"])
def test_refusals_change_nothing(call, error, text, earlier):
    if earlier:
        init(nn.Linear(2, 2), opt_level=earlier)
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    step, forward, state = optimizer.step, model.forward, dict(_amp_state.__dict__)
    active = torch.is_autocast_enabled("cpu")
    with pytest.raises(error, match=text):
        call(model, optimizer)
    assert _amp_state.__dict__ == state
    assert (optimizer.step, model.forward) == (step, forward)
    assert not hasattr(optimizer, "_amp_stash")
    assert torch.is_autocast_enabled("cpu") == active == (earlier == "O1")
    assert model.weight.dtype in (torch.float32, torch.float64)


def test_apex_ddp_is_refused(monkeypatch):
    with pytest.raises(RuntimeError, match=r"apex.parallel|DistributedDataParallel"):
        init(apex_ddp(monkeypatch))


def test_torch_ddp_is_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="wrap what it returns"):
            init(model)
    finally:
        torch.distributed.destroy_process_group()


def test_second_initialization_of_an_optimizer():
    model = nn.Linear(2, 2)
    _, optimizer = init(model, sgd(model))
    with pytest.raises(RuntimeError, match="initialized before"):
        init(model, optimizer)


def test_scale_loss_names_what_a_wrapper_holds():
    model, optimizer = init(model := nn.Linear(2, 2), sgd(model))
    block = amp.scale_loss(model(torch.ones(1, 2)).sum(), Wrapper(optimizer))
    with pytest.raises(TypeError, match=r"pass its `\.optimizer`"), block:
        pass


def test_cudnn_must_be_enabled(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    with pytest.raises(RuntimeError, match="cudnn"):
        init(nn.Linear(2, 2))


def test_hard_override_prints(capsys):
    _amp_state.hard_override = True
    init(bad_model(weight=half), opt_level="O2", verbosity=1)
    assert "parameter weight" in capsys.readouterr().out
