"""timm's optimizer names, fast norms and ApexScaler use Apex's classes and functions."""

import pytest
import timm
import timm.layers
import timm.optim
import timm.utils
import torch
from timm.layers import fast_norm
from torch.nn import functional as F

import apex.normalization.fused_layer_norm as ours
import apex.optimizers
from apex import amp

LR = 1e-3

# timm's name: the class of apex.optimizers that it stands for, and what is in its groups.
FUSED = {
    "fusedsgd": ("FusedSGD", {"nesterov": True, "momentum": 0.9}),
    "fusedmomentum": ("FusedSGD", {"nesterov": False, "momentum": 0.9}),
    "fusedadam": ("FusedAdam", {"betas": (0.9, 0.999)}),
    "fusedadamw": ("FusedAdam", {"betas": (0.9, 0.999)}),
    "fusedlamb": ("FusedLAMB", {"betas": (0.9, 0.999)}),
    "fusednovograd": ("FusedNovoGrad", {"betas": (0.95, 0.98)}),
}
# fusedmomentum went away with timm 1.0.
NAMES = [n for n in FUSED if n != "fusedmomentum" or timm.__version__.startswith("0.")]
SAME_FORMULA = {
    "fusedsgd": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True),
    "fusedmomentum": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9),
    "fusedadam": lambda p: torch.optim.Adam(p, lr=LR),
    "fusedadamw": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0),
}


@pytest.fixture
def create(monkeypatch):
    """timm's factory: it asserts that there is a GPU, so ``is_available`` says so meanwhile.

    Nothing else of timm is replaced, and ``is_available`` answers truly once the optimizer is made.
    """

    def make(parameters, name):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            return timm.optim.create_optimizer_v2(parameters, opt=name, lr=LR)

    return make


def small_model():
    """A ConvNeXt, whose layer norms are timm's own in every version; no batch norm."""
    torch.manual_seed(0)
    return timm.models.ConvNeXt(num_classes=4, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))


def train(model, step, steps=4):
    """Return the losses of a few steps on one batch; ``step(loss)`` makes each."""
    x = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x).float(), torch.tensor([0, 1, 2, 3]))
        step(loss)
        losses.append(loss.item())
    return losses


def stepper(optimizer):
    """Return what a plain training loop does with a loss."""

    def step(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("name", NAMES)
def test_factory_makes_our_optimizer(name, create):
    class_name, expected = FUSED[name]
    model = small_model()
    optimizer = create(model, name)
    assert type(optimizer) is getattr(apex.optimizers, class_name)
    for group in optimizer.param_groups:
        assert {key: group[key] for key in expected} == expected
    if class_name == "FusedAdam":
        assert bool(optimizer.adam_w_mode) == (name == "fusedadamw")
    losses = train(model, stepper(optimizer))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", [n for n in NAMES if n in SAME_FORMULA])
def test_trains_as_torch(name, create):
    model, reference = torch.nn.Linear(10, 3), torch.nn.Linear(10, 3)
    reference.load_state_dict(model.state_dict())
    steps = [stepper(create(model.parameters(), name))]
    steps.append(stepper(SAME_FORMULA[name](reference.parameters())))
    x = torch.randn(16, 10)
    for _ in range(5):
        for net, step in zip((model, reference), steps, strict=True):
            step(net(x).square().mean())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fast_norms_call_ours(dtype):
    assert fast_norm.has_apex
    assert fast_norm.has_apex_rmsnorm
    assert fast_norm.fused_layer_norm_affine is ours.fused_layer_norm_affine
    assert fast_norm.fused_rms_norm_affine is ours.fused_rms_norm_affine
    assert fast_norm.fused_rms_norm is ours.fused_rms_norm
    x = torch.randn(2, 5, 24, dtype=dtype)
    weight, bias = torch.randn(24, dtype=dtype), torch.randn(24, dtype=dtype)
    pairs = [
        (fast_norm.fast_layer_norm(x, (24,), weight, bias, 1e-6), F.layer_norm, (weight, bias)),
        (fast_norm.fast_rms_norm(x, (24,), weight, 1e-6), F.rms_norm, (weight,)),
        (fast_norm.fast_rms_norm(x, (24,), None, 1e-6), F.rms_norm, ()),
    ]
    for actual, reference, parameters in pairs:
        expected = reference(x.double(), (24,), *(p.double() for p in parameters), eps=1e-6)
        torch.testing.assert_close(actual, expected.to(dtype))


def test_model_with_fast_norm(monkeypatch):
    """Every layer norm of the model runs our kernel, forward and backward, with timm's result."""
    monkeypatch.setattr(fast_norm, "_USE_FAST_NORM", True)  # what timm.layers.set_fast_norm() sets
    fast = small_model()
    monkeypatch.undo()
    plain = small_model()
    norms = sum(isinstance(m, torch.nn.LayerNorm) for m in fast.modules())
    x = torch.randn(2, 3, 64, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = fast(x)
    ran = {event.key: event.count for event in profile.key_averages()}
    assert ran["apex_normalization::layer_norm_forward"] == norms
    expected = plain(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)


def test_apex_scaler():
    """What timm's training script does with ``--amp --amp-impl apex``, and its checkpoint entry."""
    assert timm.utils.cuda.has_apex
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    scaler = timm.utils.ApexScaler()

    def step(loss):
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())

    losses = train(model, step)
    assert losses[-1] < losses[0]
    state = scaler.state_dict()
    assert state["loss_scaler0"]["loss_scale"] > 0
    scaler.load_state_dict(state)
    assert amp.state_dict() == state
