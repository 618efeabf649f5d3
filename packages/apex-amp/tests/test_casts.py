"""The casts of O1 and O4: when and where they are in force, and that all of it can be undone."""

import contextlib
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.amp import _amp_state
from apex.amp.handle import AmpHandle, NoOpHandle

half, bfloat16, single = torch.float16, torch.bfloat16, torch.float32


def test_disable_casts_nests_and_survives_errors():
    handle = amp.init()
    x = torch.ones(2, 2)
    with amp.disable_casts():
        with pytest.raises(ZeroDivisionError), amp.disable_casts():
            1 / 0  # noqa: B018
        assert (x @ x).dtype is single
        assert not handle.is_active()
    assert (x @ x).dtype is half
    assert handle.is_active()


@pytest.mark.parametrize("level", ["O0", "O2", None])
def test_disable_casts_without_casts(level):
    if level:
        amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    with amp.disable_casts():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is single


def test_repeated_calls_restore_the_state_before_the_first():
    handles = [amp.init(), amp.init(patch_type=bfloat16), amp.init()]
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is half
    assert [h.is_active() for h in handles] == [False, False, True]
    handles[-1]._deactivate()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is single
    assert torch.ones(2, dtype=half).exp().dtype is half


def test_within_an_autocast_region_of_the_users():
    with torch.autocast("cpu", dtype=bfloat16):
        handle = amp.init()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is half
        handle._deactivate()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is bfloat16


def in_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_models_cast_in_every_thread():
    model = amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
    x = torch.randn(2, 4)
    assert in_thread(lambda: model(x).dtype) is half
    assert in_thread(lambda: torch.is_autocast_enabled("cpu")) is False

    def without_casts():
        with amp.disable_casts():
            return model(x).dtype

    assert in_thread(without_casts) is single
    assert model(x).dtype is half
    _amp_state.handle._deactivate()
    assert in_thread(lambda: model(x).dtype) is single
    assert model(x).dtype is single


def test_users_autocast_is_respected_in_model_calls():
    model = amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
    with torch.autocast("cpu", enabled=False):
        assert model(torch.randn(2, 4)).dtype is single
    with torch.autocast("cpu", dtype=bfloat16):
        assert model(torch.randn(2, 4)).dtype is bfloat16


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_children_cast_only_in_models():
    """A data loader's worker must not run its transforms in 16 bits."""
    model = amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
    data = torch.utils.data.DataLoader(
        _Products(model), batch_size=1, num_workers=1, multiprocessing_context="fork"
    )
    plain, through_model = next(iter(data))
    assert plain.dtype is single
    assert through_model.dtype is half
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is half


class _Products(torch.utils.data.Dataset):
    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return torch.ones(4, 4) @ torch.ones(4, 4), self.model(torch.ones(4)).detach()


def test_weights_are_never_stale():
    """Training, evaluation, and changes of the weights behind amp's back."""
    model = amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
    x = torch.randn(2, 4)

    def output():
        return model(x).float()

    for _ in range(2):
        with torch.no_grad():
            assert not output().requires_grad
        before = output()
        before.sum().backward()
        assert model.weight.grad.abs().sum() > 0
        model.weight.grad = None
        model.weight.data.neg_()
        model.bias.data.neg_()
        assert torch.equal(output(), -before)


class Recurrent(nn.Linear):
    """Uses its weight twice in a call; what happens in between is up to the test."""

    def forward(self, x, between):
        first = super().forward(x)
        with between() or contextlib.nullcontext():
            middle = super().forward(x)
        return first, middle, super().forward(x)


def call_recurrent(between):
    torch.manual_seed(0)
    model = amp.initialize(Recurrent(4, 4), opt_level="O1", verbosity=0)
    return model, model(torch.ones(2, 4), between)


def test_weights_are_not_stale_within_a_call():
    _, (first, middle, last) = call_recurrent(torch.no_grad)
    assert [t.requires_grad for t in (first, middle, last)] == [True, False, True]
    model, outputs = call_recurrent(amp.disable_casts)
    assert [t.dtype for t in outputs] == [half, single, half]
    last = outputs[-1]
    last.float().sum().backward()
    assert model.weight.grad is not None

    def freeze():
        model.requires_grad_(False)

    model = amp.initialize(Recurrent(4, 4), opt_level="O1", verbosity=0)
    first, middle, last = model(torch.ones(2, 4), freeze)
    assert [t.requires_grad for t in (first, middle, last)] == [True, False, False]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "reentrant checkpoint"])
@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_first_used_without_gradients(level, mode):
    """The cast of a weight that no gradient goes through is not taken where one is needed."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            if mode == "reentrant checkpoint":
                return self.shared(x + checkpoint(self.shared, x, use_reentrant=True))
            with getattr(torch, mode)():
                constant = self.shared(x)
            return self.shared(x + constant.clone())

    def grads(level):
        torch.manual_seed(0)
        model = Twice()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        with amp.scale_loss(model(torch.ones(3, 4)).float().pow(2).mean(), optimizer) as scaled:
            scaled.backward()
        return [param.grad for param in model.parameters()]

    allowed = {"O0": 0.0, "O1": 0.01, "O4": 0.05}[level]
    for actual, expected in zip(grads(level), grads("O0"), strict=True):
        assert (actual - expected).norm() <= allowed * expected.norm()


def test_a_step_within_a_call_is_seen():
    model = Recurrent(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def step():
        for param in model.parameters():
            param.grad = 2 * param.detach()
        optimizer.step()  # every parameter becomes its negative

    with torch.no_grad():
        first, middle, last = model(torch.ones(2, 4), step)
    assert torch.equal(first, -middle)
    first, middle, last = model(torch.ones(2, 4), step)
    assert torch.equal(first, -middle)
    assert torch.equal(middle, last)


@pytest.mark.parametrize("caching", [True, False])
def test_a_weight_is_cast_once_per_call(caching):
    class Twice(nn.Linear):
        def forward(self, x):
            return F.linear(F.linear(x, self.weight), self.weight)

    model = amp.initialize(Twice(4, 4), opt_level="O1", verbosity=0)
    _amp_state.handle._casting.cache_enabled = caching
    assert _amp_state.handle.has_cache == caching
    graph, casts = [model(torch.randn(2, 4)).grad_fn], set()
    while graph:
        node = graph.pop()
        casts |= {node} if "ToCopy" in node.name() else set()
        graph += [n for n, _ in node.next_functions if n is not None]
    is_sound = torch.__version__ >= (2, 11)  # the cache of 2.10 would lose gradients
    assert len(casts) == (1 if caching and is_sound else 2)


def test_float32_regions_have_float32_backwards():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    a, b, cotangent = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8), torch.randn(8, 8)
    with amp.disable_casts():
        product = a @ b
        expected = 65536 * cotangent @ b.T
    with amp.scale_loss((product * cotangent).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        assert model(torch.randn(2, 4)).dtype is half  # models cast even here
    assert torch.equal(a.grad, expected)


def test_verbosity_2_prints_casts(capsys):
    model = amp.initialize(nn.Linear(4, 2), opt_level="O1", verbosity=2)
    capsys.readouterr()
    model(torch.randn(3, 4))
    out = capsys.readouterr().out
    assert "cast float32 to float16: [3, 4] cpu" in out
    assert "cast float32 to float16: [2, 4] cpu" in out


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_compiled_model(level, device):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)
    model = amp.initialize(model, opt_level=level, verbosity=0)
    x = torch.randn(4, 8, device=device)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = compiled(x)
    assert actual.dtype is expected.dtype
    assert torch.equal(actual, expected)
    actual.float().sum().backward()
    assert model[0].weight.grad is not None
    with amp.disable_casts():
        assert compiled(x).dtype is single


def test_inits_that_do_nothing():
    assert isinstance(amp.init(enabled=False), NoOpHandle)
    assert not hasattr(_amp_state, "handle")
    with pytest.raises(RuntimeError, match="patch_type"):
        amp.init(patch_type=torch.float64)
    assert not hasattr(_amp_state, "handle")


def test_legacy_members_of_handles():
    handle = amp.init(enable_caching=False, verbose=True)
    assert isinstance(handle, AmpHandle)
    assert (handle.has_cache, handle.verbose) == (False, True)
    with (
        pytest.raises(RuntimeError, match=r"amp\.initialize"),
        handle.scale_loss(torch.ones(1), None),
    ):
        pass
    nothing = NoOpHandle()
    assert (nothing.is_active(), nothing.has_cache, nothing.verbose) == (False, False, False)
    loss = torch.ones(1)
    with nothing.scale_loss(loss, None) as scaled:
        assert scaled is loss
    with nothing._disable_casts():
        nothing._clear_cache()
    nothing._deactivate()
