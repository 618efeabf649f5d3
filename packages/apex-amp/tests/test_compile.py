"""Initialized models under torch.compile, torch.utils.checkpoint, threads and the meta device."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
DTYPES = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


def network():
    return nn.Sequential(
        *(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU()),
        *(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)),
    )


def train(model, optimizer, call=None, steps=3, seed=0):
    losses = []
    data = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(6, 8, generator=data)
        output = (call or model)(x).float()  # O1 and O4 cast in every thread, but only in models
        loss = F.cross_entropy(output, torch.arange(6) % 4)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def build(level, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"loss_scale": 256.0}
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def check_same_training(level, call_of, steps=3):
    start = network()
    model, optimizer = build(level, copy.deepcopy(start))
    expected = train(model, optimizer, steps=steps)
    expected_state = model.state_dict()
    model, optimizer = build(level, start)
    actual = train(model, optimizer, call_of(model), steps=steps)
    assert actual == expected
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected_state[name]), name


@pytest.mark.parametrize("level", LEVELS)
def test_compiled_training(level):
    """One graph, no break; in training and evaluation, and again at another level."""
    torch._dynamo.reset()
    compiled = lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")
    check_same_training(level, compiled, steps=2)
    model, _ = build("O0" if level != "O0" else "O5", network())
    call = compiled(model.eval())
    with torch.no_grad():
        assert torch.equal(call(torch.ones(2, 8)), model(torch.ones(2, 8)))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_training_of_generated_code(level):
    """torch's default compiler fuses, so it rounds at fewer places than eager code."""
    torch._dynamo.reset()
    start = network()
    model, optimizer = build(level, copy.deepcopy(start))
    expected = torch.stack(train(model, optimizer, steps=6))
    model, optimizer = build(level, start)
    call = torch.compile(model, fullgraph=True)
    actual = torch.stack(train(model, optimizer, call, steps=6))
    eps = torch.finfo(torch.bfloat16 if level == "O5" else torch.float16).eps
    torch.testing.assert_close(actual, expected, rtol=4 * eps, atol=0)
    assert actual[-1] < actual[0]
    x = torch.ones(2, 8)
    with torch.no_grad():
        assert call(x).dtype is model(x).dtype


def test_compiled_method():
    """``model.compile()`` compiles in place."""
    torch._dynamo.reset()
    model, optimizer = build("O2", network())
    model.compile(fullgraph=True, backend="aot_eager")
    losses = train(model, optimizer)
    assert all(loss.isfinite() for loss in losses)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("level", LEVELS)
def test_checkpointed_segments(level, reentrant):
    """Recomputed in the backward pass, inside of the scale_loss block, with the same casts."""

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            x = self.inner[0](x)
            x = checkpoint(self.inner[2:5], x, use_reentrant=reentrant)
            return self.inner[5](x)

    class Plain(Checkpointed):
        def forward(self, x):
            return self.inner[5](self.inner[2:5](self.inner[0](x)))

    start = network()
    results = []
    for cls in (Plain, Checkpointed):
        model, optimizer = build(level, cls(copy.deepcopy(start)))
        results.append((train(model, optimizer), list(model.parameters())))
    (expected, expected_params), (actual, params) = results
    assert actual == expected
    for a, e in zip(params, expected_params, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("level", LEVELS)
def test_training_in_threads(level):
    """Models of one initialization, each trained in its own thread, as one after another."""
    starts = [network() for _ in range(3)]

    def build_all():
        models = copy.deepcopy(starts)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
        options = {"verbosity": 0, "loss_scale": 256.0}
        return amp.initialize(models, optimizers, opt_level=level, **options)

    pairs = list(zip(*build_all(), strict=True))
    expected = [train(*pair, seed=i) for i, pair in enumerate(pairs)]
    pairs = list(zip(*build_all(), strict=True))
    actual = [None] * len(pairs)

    def work(i):
        actual[i] = train(*pairs[i], seed=i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert actual == expected


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_export(level, strict):
    model = amp.initialize(network().eval(), opt_level=level, verbosity=0)
    x = torch.randn(6, 8)
    exported = torch.export.export(model, (x,), strict=strict).module()
    assert torch.equal(exported(x), model(x))
    amp.initialize(network(), opt_level="O0", verbosity=0)  # ends the casts of O1 and O4
    assert torch.equal(exported(x), model(x))


def on_meta():
    with torch.device("meta"):
        return network()


def materialize(model):
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@pytest.mark.parametrize("level", LEVELS)
def test_meta_device(level):
    """Initialized before and after it has values; an optimizer of before is refused."""
    model, optimizer = build(level, on_meta())
    materialize(model)
    with pytest.raises(RuntimeError, match="is on the meta device"):
        train(model, optimizer)

    model = amp.initialize(on_meta(), opt_level=level, verbosity=0)
    materialize(model)
    assert model[0].weight.dtype is DTYPES.get(level, torch.float32)
    assert model(torch.ones(2, 8)).isfinite().all()

    model = on_meta()
    materialize(model)
    model, optimizer = build(level, model)
    before = model[0].weight.clone()
    train(model, optimizer)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("level", LEVELS)
def test_assigned_checkpoints(level):
    """load_state_dict(assign=True) keeps the level's dtype, and masters get the whole values."""
    state = network().state_dict()
    model = amp.initialize(on_meta(), opt_level=level, verbosity=0)
    model.load_state_dict(state, assign=True)
    assert model[0].weight.dtype is DTYPES.get(level, torch.float32)
    for name, value in model.state_dict().items():
        is_exact = name.startswith("1.") or value.dtype is not torch.float32
        assert is_exact or level == "O3" or torch.equal(value, state[name]), name
