"""Pickles that name the modules in which amp's classes were before they moved."""

import importlib
import pickle
import subprocess
import sys

import pytest
import torch

from apex import amp

# Module -> what is held by pickles of its classes and functions, by the path that scripts import.
MOVED = {
    "_checks": ["_initialize.check_models", "_initialize.check_optimizers"],
    "_debug": ["debug"],
    "_debug_report": ["debugging.report.DebugReport", "debugging.report.ModuleRecord"],
    "_forward": ["casting.forward.AmpForward"],
    "_grads": ["_process_optimizer.post_backward_models_are_masters"],
    "_masters": ["_initialize.O2StateDictHook", "masters.exact.ExactLoadHook"],
    "_nested": ["_initialize.applier", "_initialize.to_type"],
    "_properties": ["frontend.Properties", "frontend.O2"],
    "_rnn_functions": ["rnn_compat.VariableFunctionsShim"],
    "_stash": ["_process_optimizer.AmpOptimizerState"],
    "_unscale_python": ["scaler.scale_check_overflow_python"],
}
NAMES = [(old, path) for old, paths in MOVED.items() for path in paths]


def as_before(value):
    """The pickle of ``value`` with the modules' old names: protocol 2 has them in lines of text."""
    pickled = pickle.dumps(value, protocol=2)
    for old, paths in MOVED.items():
        new = held(paths[0]).__module__
        pickled = pickled.replace(f"c{new}\n".encode(), f"capex.amp.{old}\n".encode())
    return pickled


def held(path):
    module, _, name = f"apex.amp.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("old", "path"), NAMES)
def test_names(old, path):
    name = path.rpartition(".")[2]
    assert pickle.loads(f"capex.amp.{old}\n{name}\n.".encode()) is held(path)


def test_new_module_is_not_touched():
    """Imported by its old name, a module keeps the new one."""
    old = importlib.import_module("apex.amp._debug_report")
    new = importlib.import_module("apex.amp.debugging.report")
    assert old is new
    assert new.__name__ == new.__spec__.name == "apex.amp.debugging.report"
    with pytest.raises(ModuleNotFoundError, match="_unheard"):
        importlib.import_module("apex.amp._unheard")


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_model(level):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(2, 4)
    with amp.scale_loss(model(x).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    pickled = as_before(model)
    assert b"apex.amp.casting" not in pickled
    assert b"apex.amp.masters" not in pickled
    again = pickle.loads(pickled)
    assert torch.equal(again(x), model(x))
    saved = model.state_dict()
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.float32}
    for name, value in again.state_dict().items():
        assert torch.equal(value, saved[name])


def test_first_import_of_a_process():
    pickled = as_before(amp.frontend.O2)
    code = f"import pickle; print(pickle.loads({pickled!r}))"
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output == "<class 'apex.amp.casting.levels.O2'>\n"
