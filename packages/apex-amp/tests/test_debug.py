"""amp.debug: dtypes of modules, where an inf or NaN arose first, loss scales, the plot."""

import copy
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.amp import _amp_state

half, bfloat16, single = torch.float16, torch.bfloat16, torch.float32


class Block(nn.Module):
    """Its own code, after its layer, can go wrong in each direction."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.act = nn.GELU()
        self.fault = None

    def forward(self, x):
        x = self.layer(x)
        if self.fault == "log":
            x = x + (x.float() * 0).log().to(x.dtype)
        if self.fault == "sqrt":  # finite, but its derivative at 0 is not
            x = x + (x.float() - x.float()).sqrt().to(x.dtype)
        return self.act(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return F.softmax(self.head(self.norm(self.blocks(x))), dim=-1)


def build(level="O1", make=Net, **options):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_scale": "dynamic", **options}
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def step(model, optimizer, x=None, factor=1.0, loss_id=0):
    x = torch.ones(4, 6) + torch.arange(4.0)[:, None] if x is None else x
    loss = model(x).float().square().mean() * factor
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer, loss_id) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return loss.item()


LAYER_DTYPES = {"O0": single, "O1": half, "O2": half, "O3": half, "O4": bfloat16, "O5": bfloat16}


@pytest.mark.parametrize("level", LAYER_DTYPES)
def test_dtypes(level):
    model, optimizer = build(level)
    with amp.debug() as report:
        for _ in range(3):
            step(model, optimizer)
    modules = report.modules
    assert list(modules) == [name for name, _ in model.named_modules()]
    is_cast = level in ("O2", "O3", "O5")
    dtype = LAYER_DTYPES[level]
    layer, norm = modules["blocks.1.layer"], modules["norm"]
    assert layer.compute_dtype is dtype
    assert dict(layer.outputs) == {dtype: 3}
    assert layer.parameters == (dtype if is_cast else single,)
    assert (layer.kind, layer.calls) == ("Linear", 3)
    assert norm.compute_dtype is (dtype if is_cast else single)
    assert modules[""].compute_dtype is (dtype if is_cast else single)  # the softmax
    assert modules["blocks"].compute_dtype is None
    assert not report.nonfinite()
    text = str(report)
    (line,) = [row for row in text.splitlines() if row.startswith("blocks.1.layer ")]
    assert line.split()[-2:] == [str(dtype).removeprefix("torch."), "3"]
    assert "loss 0: 3 iterations, scale 65536 to 65536, 0 steps skipped" in text
    assert "no inf or NaN" in text


def broken(model, name, fault):
    module = model.get_submodule(name)
    if fault == "weight":
        with torch.no_grad():
            module.weight[0, 0] = float("nan")
    else:
        module.fault = fault


# fault, module, and where it is found: module, direction, kind.
FAULTS = [
    ("weight", "head", "head", "forward", "NaN"),
    ("weight", "blocks.0.layer", "blocks.0.layer", "forward", "NaN"),
    ("log", "blocks.1", "blocks.1", "forward", "inf"),
    ("sqrt", "blocks.1", "blocks.1", "backward", "inf"),
    ("sqrt", "blocks.0", "blocks.0", "backward", "inf"),
]


@pytest.mark.parametrize(("fault", "where", "module", "direction", "kind"), FAULTS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_first_nonfinite(level, fault, where, module, direction, kind):
    model, optimizer = build(level)
    with amp.debug(model) as report:
        step(model, optimizer)
        broken(model, where, fault)
        step(model, optimizer)
    ((index, place),) = report.nonfinite()
    assert index == 1
    assert (place.module, place.direction, place.kind) == (module, direction, kind)
    assert [it.is_skipped for it in report.iterations] == [False, True]
    assert f"iteration 1: {place.kind} in {direction}: {module}, " in str(report)


def test_inputs_and_losses():
    model, optimizer = build()
    inf = float("inf")
    with amp.debug(model) as report:
        step(model, optimizer, torch.full((4, 6), inf))
        step(model, optimizer, factor=inf)
        step(model, optimizer, factor=1e36)
        step(model, optimizer)
    places = [it.first_nonfinite for it in report.iterations]
    assert (places[0].module, places[0].what) == ("", "its input")
    assert (places[1].module, places[1].what) == (None, "the loss")
    assert (places[2].module, places[2].what) == (None, "the loss times the loss scale")
    assert places[3] is None
    assert report.loss_scales() == [65536.0, 32768.0, 16384.0, 8192.0]


def test_overflow_of_16_bit_gradients():
    model, optimizer = build("O2")
    with amp.debug(model) as report:
        step(model, optimizer, factor=1e4)
    place = report.iterations[0].first_nonfinite
    assert (place.direction, place.kind) == ("backward", "inf")
    assert place.module in report.modules


def test_masks_of_minus_infinity_are_no_fault():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.attention = nn.Identity()

        def forward(self, x):
            mask = self.attention(torch.full((6, 6), float("-inf")).triu(1))
            return (self.layer(x)[:, None] + mask).softmax(-1)

    model, optimizer = build(make=Masked)
    with amp.debug() as report:
        step(model, optimizer)
    assert not report.nonfinite()


@pytest.mark.parametrize("level", LAYER_DTYPES)
def test_changes_no_bit_and_leaves_no_hook(level):
    start = Net()
    results = []
    for is_watched in (False, True):
        model, optimizer = build(level, lambda: copy.deepcopy(start))
        if is_watched:
            with amp.debug():
                losses = [step(model, optimizer) for _ in range(3)]
        else:
            losses = [step(model, optimizer) for _ in range(3)]
        losses.append(step(model, optimizer))
        results.append((losses, [p.detach() for p in amp.master_params(optimizer)]))
    (losses, params), (expected_losses, expected) = results
    assert losses == expected_losses
    assert all(map(torch.equal, params, expected))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert _amp_state.debugger is None


def test_an_exception_ends_it():
    model, optimizer = build()
    with pytest.raises(RuntimeError, match="shapes"), amp.debug():
        model(torch.ones(2, 7))
    with amp.debug() as report:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 7))
        step(model, optimizer)
    assert report.modules["head"].compute_dtype is half
    assert not model._forward_hooks


def test_several_models_and_losses():
    models = [nn.Linear(6, 6), nn.Linear(6, 3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    models, optimizers = amp.initialize(
        models, optimizers, opt_level="O2", num_losses=2, verbosity=0
    )
    with amp.debug() as report:
        step(models[0], optimizers[0])
        step(models[1], optimizers[1], loss_id=1, factor=float("inf"))
        step(models[1], optimizers[1], loss_id=1)
    assert list(report.modules) == ["models[0]", "models[1]"]
    assert [report.modules[name].calls for name in report.modules] == [1, 2]
    assert report.loss_scales(0) == [65536.0]
    assert report.loss_scales(1) == [65536.0, 32768.0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_and_threaded_models(reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            x = checkpoint(self.blocks, x.requires_grad_(), use_reentrant=reentrant)
            return self.head(x)

    model, optimizer = build(make=Checkpointed)
    model.blocks[1].fault = "sqrt"
    with amp.debug() as report:
        thread = threading.Thread(target=step, args=(model, optimizer))
        thread.start()
        thread.join()
    (iteration,) = report.iterations
    assert iteration.first_nonfinite.direction == "backward"
    assert report.modules["blocks.0.layer"].compute_dtype is half
    assert report.modules["blocks.0.layer"].calls == 2  # the second time in the backward pass


def test_compiled_models_run():
    torch._dynamo.reset()
    model, optimizer = build()
    compiled = torch.compile(model, backend="eager")
    with amp.debug() as report:
        step(compiled, optimizer, factor=1e36)
    assert "did not run, or ran compiled" in str(report)
    assert report.iterations[0].is_skipped


def test_disabled_amp():
    model, optimizer = build(enabled=False)
    with amp.debug(model) as report:
        step(model, optimizer)
    assert report.modules["head"].compute_dtype is single
    assert report.loss_scales() == [1.0]


def test_refusals():
    with pytest.raises(RuntimeError, match="no models to watch"), amp.debug():
        pass
    with pytest.raises(TypeError, match="got int"), amp.debug([nn.Linear(2, 2), 3]):
        pass
    with amp.debug(nn.Linear(2, 2)) as report, pytest.raises(RuntimeError, match="already"):
        amp.debug(nn.Linear(2, 2)).__enter__()
    assert "no scale_loss block has ended" in str(report)
    assert _amp_state.debugger is None


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    model, optimizer = build()
    with amp.debug() as report:
        for factor in (1.0, float("inf"), 1.0):
            step(model, optimizer, factor=factor)
    figure = report.plot(tmp_path / "scales.png")
    assert (tmp_path / "scales.png").read_bytes().startswith(b"\x89PNG")
    steps, marks = figure.axes[0].lines
    assert list(steps.get_ydata()) == [65536.0, 65536.0, 32768.0]
    assert list(marks.get_xdata()) == [1]


def test_plot_without_matplotlib(monkeypatch):
    with amp.debug(nn.Linear(2, 2)) as report:
        pass
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot()
