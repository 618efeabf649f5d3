"""TorchScript of initialized models: it casts as the model does, or the error says what to do."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

HALVES = {"O1": torch.float16, "O4": torch.bfloat16}
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


class Net(nn.Module):
    """Has what TorchScript must find: default arguments, a global name, control flow."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x, scale: float = 2.0):
        if x.dim() == 1:
            x = x[None]
        return F.softmax(self.norm(self.linear(x)) * scale, -1), self.linear(x)


class Container(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, 3.0)[1]


@pytest.mark.parametrize("level", HALVES)
def test_scripted_models_cast_as_models_do(level):
    x = torch.randn(2, 8)
    model = amp.initialize(Net(), opt_level=level, verbosity=0)
    scripted = torch.jit.script(model)
    for arguments in ((x,), (x[0], 0.5)):
        outputs = scripted(*arguments)
        assert [y.dtype for y in outputs] == [torch.float32, HALVES[level]]
        for actual, expected in zip(outputs, model(*arguments), strict=True):
            # TorchScript adds the bias in an operation of its own, which rounds once more.
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-2)
    assert torch.jit.script(Container(model))(x).dtype is HALVES[level]
    with amp.disable_casts():
        assert scripted(x)[1].dtype is torch.float32
    if level == "O1":  # torch compiles a script's backward once a process, for one dtype
        outputs[1].float().sum().backward()
        assert model.linear.weight.grad.abs().sum() > 0
    assert model(x)[1].dtype is HALVES[level]  # and the model is as it was


def test_another_thread_has_no_casts():
    """As the guide says: they come from autocast, not from the compiled code."""
    scripted = torch.jit.script(amp.initialize(Net(), opt_level="O4", verbosity=0))
    dtypes = []
    thread = threading.Thread(target=lambda: dtypes.append(scripted(torch.randn(2, 8))[1].dtype))
    thread.start()
    thread.join()
    assert dtypes == [torch.float32]


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("O0", "inputs to torch.float32 and outputs to torch.float32"),
        ("O2", "inputs to torch.float16 and outputs to torch.float32"),
        ("O3", "inputs to torch.float16"),
        ("O5", "inputs to torch.bfloat16"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda model: model, Container])
def test_models_that_cast_are_refused_with_the_remedy(level, said, wrap):
    x = torch.randn(2, 8)
    model = amp.initialize(Net(), opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match=f"amp.initialize made Net cast its {said}") as refused:
        torch.jit.script(wrap(model))
    assert "torch.jit.trace" in str(refused.value)
    traced = torch.jit.trace(model, x)
    for actual, expected in zip(traced(x), model(x), strict=True):
        assert torch.equal(actual, expected)
    fresh = torch.jit.script(Net())
    fresh.load_state_dict(model.state_dict())
    assert fresh(x)[1].dtype is torch.float32


def test_casts_that_were_switched_off():
    model = amp.initialize(Net(), opt_level="O1", verbosity=0)
    amp._amp_state.handle._deactivate()
    with pytest.raises(RuntimeError, match="switched off the casts of Net"):
        torch.jit.script(model)
    del model.forward
    assert torch.jit.script(model)(torch.ones(2, 8))[1].dtype is torch.float32


def test_outputs_that_are_cast_are_refused():
    model = amp.initialize(Net(), opt_level="O1", cast_model_outputs=torch.float32, verbosity=0)
    with pytest.raises(RuntimeError, match=r"cast its outputs to torch\.float32"):
        torch.jit.script(model)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
@pytest.mark.parametrize(
    ("wrap", "name"), [(lambda m: m, r"models\[0\]"), (Container, r"models\[0\]\.inner")]
)
def test_scripts_that_would_have_to_cast_are_refused(wrap, name, level):
    model = wrap(torch.jit.script(Net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=f"initialize: {name} is compiled .*torch.jit.trace"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    output = model(torch.randn(2, 8))
    assert (output if wrap is Container else output[1]).dtype is HALVES["O1"]
