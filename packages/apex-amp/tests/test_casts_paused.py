"""``handle._is_active``, which scripts for Apex set to leave the casts of O1 and enter them."""

import contextlib
import threading

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _amp_state


@contextlib.contextmanager
def copied_disable_casts():
    """As scripts have it."""
    _amp_state.handle._is_active = False
    yield
    _amp_state.handle._is_active = True


class Model(nn.Module):
    """Notes the dtypes of its products before, within and after a pause of its own."""

    def __init__(self, pauses=False):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.pauses = pauses
        self.dtypes = []

    def forward(self, x):
        self.dtypes = [self.layer(x).dtype]
        with copied_disable_casts() if self.pauses else contextlib.nullcontext():
            self.dtypes.append(self.layer(x).dtype)
        y = self.layer(x)
        self.dtypes.append(y.dtype)
        return y


LEVELS = {"O1": torch.float16, "O4": torch.bfloat16}
FP32 = torch.float32


def build(level, pauses=False):
    model = amp.initialize(Model(pauses), opt_level=level, verbosity=0)
    return model, LEVELS[level], torch.randn(2, 4)


@pytest.mark.parametrize("level", LEVELS)
def test_casts_stop_and_go_on(level):
    model, low, x = build(level)
    assert _amp_state.handle._is_active
    for _ in range(2):
        _amp_state.handle._is_active = False
        assert not _amp_state.handle.is_active()
        assert not _amp_state.handle._is_active
        model(x)
        assert model.dtypes == [FP32] * 3
        assert (x @ x.T).dtype is FP32
        _amp_state.handle._is_active = True
        assert _amp_state.handle.is_active()
        model(x)
        assert model.dtypes == [low] * 3
        assert (x @ x.T).dtype is low


@pytest.mark.parametrize("level", LEVELS)
def test_within_a_model(level):
    model, low, x = build(level, pauses=True)
    model(x).sum().backward()
    assert model.dtypes == [low, FP32, low]
    assert (x @ x.T).dtype is low


def test_all_threads():
    """Autocast's state belongs to a thread; Apex's flag does not."""
    model, low, x = build("O1", pauses=True)
    found = []

    def run():
        found.append(model.forward(x).dtype)
        found.append(list(model.dtypes))
        found.append((x @ x.T).dtype)

    for is_active in (False, True):
        _amp_state.handle._is_active = is_active
        if not is_active:
            model.pauses = False
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        model.pauses = True
    assert found == [FP32, [FP32] * 3, FP32, low, [low, FP32, low], FP32]


def test_a_pause_outlasts_blocks():
    """It begins in one block and ends in another."""
    model, low, x = build("O1")
    with amp.disable_casts():
        _amp_state.handle._is_active = False
    assert (x @ x.T).dtype is FP32
    with amp.disable_casts():
        _amp_state.handle._is_active = True
        assert (x @ x.T).dtype is FP32
    assert (x @ x.T).dtype is low

    y = model(x)
    y.register_hook(lambda grad: setattr(_amp_state.handle, "_is_active", False))
    y.sum().backward()
    assert (x @ x.T).dtype is FP32
    _amp_state.handle._is_active = True
    assert (x @ x.T).dtype is low


def test_functions_of_users():
    function = amp.half_function(lambda x: x.dtype)
    _, low, x = build("O1")
    with copied_disable_casts():
        assert function(x) is FP32
    assert function(x) is low


def test_a_model_that_begins_paused():
    """Its own thread had no casts before, and has none after."""
    model, low, x = build("O1")
    found = []

    class Inner(nn.Module):
        def forward(self, x):
            _amp_state.handle._is_active = True
            return model.layer(x)

    inner = Inner()
    amp.initialize(inner, opt_level="O1", verbosity=0)
    _amp_state.handle._is_active = False

    def run():
        found.append(inner(x).dtype)
        found.append((x @ x.T).dtype)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [low, FP32]


def test_a_new_initialization_starts_active():
    build("O1")
    _amp_state.handle._is_active = False
    _, low, x = build("O4")
    assert (x @ x.T).dtype is low
    amp.initialize(nn.Linear(2, 2), opt_level="O0", verbosity=0)
    assert (x @ x.T).dtype is FP32
