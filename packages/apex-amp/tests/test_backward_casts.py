"""Backward passes run without casts wherever they are called, in a scale_loss block or not."""

import copy
import inspect
import threading

import pytest
import torch
from torch import nn
from torch.autograd import grad as imported_grad
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.amp import _amp_state

single = torch.float32
LOWER = {"O1": torch.float16, "O4": torch.bfloat16}


def build(level="O1", model=None):
    torch.manual_seed(0)
    return amp.initialize(model or nn.Linear(8, 8), opt_level=level, verbosity=0)


def product():
    """A loss of float32 code whose gradients are lost or infinite in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(8, 8, generator=generator).requires_grad_()
    b = torch.randn(8, 8, generator=generator)
    scales = torch.logspace(-9, 9, 8)[:, None]
    with amp.disable_casts():
        loss = ((a @ b) * scales).sum()
        expected = scales.expand(8, 8) @ b.T
    return loss, a, expected


def state():
    """What torch keeps of autocast for a CPU, and how many blocks of it are open."""
    depth = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
    is_on, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return is_on, dtype, torch.is_autocast_cache_enabled(), *depth


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("level", LOWER)
def test_casts_are_switched_off_as_torch_does(level, enabled):
    """In the block, and behind it."""
    build(level)
    handle, other = _amp_state.handle, {torch.float16: torch.bfloat16}.get(LOWER[level])
    with torch.autocast("cpu", other or torch.float16, enabled=enabled, cache_enabled=enabled):
        before = state()
        with torch.autocast("cpu", LOWER[level], enabled=False, cache_enabled=False):
            expected = state()
        assert expected[:3] != before[:3]
        for block in (handle._backward, handle._disable_casts, amp.disable_casts):
            with block():
                assert state() == expected
            assert state() == before


def through_backward(loss, a):
    loss.backward()
    return a.grad


WAYS = {
    "Tensor.backward": through_backward,
    "autograd.backward": lambda loss, a: through_backward_function(loss, a),
    "autograd.grad": lambda loss, a: torch.autograd.grad(loss, a)[0],
    "grad": lambda loss, a: imported_grad(loss, a)[0],
    "batched": lambda loss, a: torch.autograd.grad(loss, a, torch.ones(1), is_grads_batched=True)[
        0
    ][0],
}


def through_backward_function(loss, a):
    torch.autograd.backward([loss])
    return a.grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_float32_code_has_float32_gradients(level, way):
    build(level)
    loss, a, expected = product()
    assert torch.equal(WAYS[way](loss, a), expected)
    x = torch.ones(8, 8)
    assert (x @ x).dtype is LOWER.get(level, single)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_within_a_model_in_any_thread(level):
    """Such as forces that are the gradient of an energy."""

    class Forces(nn.Linear):
        def forward(self, x):
            loss, a, expected = product()
            (actual,) = torch.autograd.grad(loss, a)
            assert torch.equal(actual, expected)
            return super().forward(x)

    model, dtypes = build(level, Forces(8, 8)), []
    call = lambda: dtypes.append(model(torch.ones(2, 8)).dtype)
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    call()
    assert dtypes == [LOWER[level]] * 2


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_double_backward(level):
    """A gradient penalty; what it computes of the gradients casts like all of the user's code."""
    model = build(level)
    loss, a, _ = product()
    with amp.disable_casts():
        loss = loss + a.pow(3).sum() * 1e-9
    (first,) = torch.autograd.grad(loss, a, create_graph=True)
    assert (first @ first).dtype is LOWER[level]
    assert model(first).dtype is LOWER[level]
    (second,) = torch.autograd.grad(first.sum(), a)
    torch.testing.assert_close(second, 6e-9 * a.detach(), rtol=1e-6, atol=0)

    x = torch.ones(2, 8, requires_grad=True)
    (penalized,) = torch.autograd.grad(model(x).float().pow(2).sum(), x, create_graph=True)
    penalized.norm().backward()
    reference = nn.Linear(8, 8)
    reference.load_state_dict(model.state_dict())
    with amp.disable_casts():
        output = reference(x).pow(2).sum()
    (expected,) = torch.autograd.grad(output, x, create_graph=True)
    expected.norm().backward()
    error = (model.weight.grad - reference.weight.grad).norm() / reference.weight.grad.norm()
    assert error < {"O1": 0.01, "O4": 0.05}[level]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_checkpointed_segments_are_recomputed_with_casts(level, reentrant):
    class Net(nn.Module):
        def __init__(self, is_checkpointed):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))
            self.is_checkpointed = is_checkpointed

        def forward(self, x):
            if self.is_checkpointed:
                return checkpoint(self.inner, x, use_reentrant=reentrant)
            return self.inner(x)

    grads = []
    start = Net(False).inner
    for is_checkpointed in (False, True):
        model = Net(is_checkpointed)
        model.inner = copy.deepcopy(start)
        model = build(level, model)
        dtypes = []
        model.inner[0].register_forward_hook(
            lambda m, i, output, seen=dtypes: seen.append(output.dtype)
        )
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        model(x).float().pow(2).sum().backward()
        assert dtypes == [LOWER[level]] * (1 + is_checkpointed)
        grads.append([p.grad for p in (x, *model.parameters())])
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


def test_models_cast_in_hooks_of_a_backward_pass():
    model = build()
    loss, a, _ = product()
    dtypes = []
    a.register_hook(lambda grad: dtypes.append((model(grad).dtype, (grad @ grad).dtype)))
    loss.backward()
    assert dtypes == [(torch.float16, single)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_compiled_models(level):
    """As eager ones, also where a part of the model computes in float32."""

    class Net(nn.Sequential):
        def forward(self, x):
            x = self[0](x).float()
            with torch.autocast("cpu", enabled=False):
                return (x @ self[1].weight.float()) * 1e-9

    torch._dynamo.reset()
    start, grads = Net(nn.Linear(8, 8), nn.Linear(8, 8)), []
    for wrap in (lambda m: m, lambda m: torch.compile(m, fullgraph=True, backend="aot_eager")):
        model = build(level, copy.deepcopy(start))
        call = wrap(model)
        for _ in range(2):
            call(torch.ones(4, 8)).sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
        assert level == "O2" or model[1].weight.grad.abs().min() > 0
    for eager, compiled in zip(*grads, strict=True):
        assert torch.equal(eager, compiled)


def test_casts_are_on_again_after_an_error():
    build()
    loss, a, _ = product()

    def fail(grad):
        raise KeyboardInterrupt

    a.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16
    assert model_dtype() is torch.float16


def model_dtype():
    return build()(torch.ones(1, 8)).dtype


def test_torch_is_as_before_afterwards():
    public = torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward
    texts = [(f.__doc__, inspect.signature(f)) for f in public]
    run_backward = torch.autograd._engine_run_backward
    build("O1")
    build("O4")
    assert torch.autograd._engine_run_backward is not run_backward
    assert public == (torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward)
    assert texts == [(f.__doc__, inspect.signature(f)) for f in public]
    _amp_state.handle._deactivate()
    assert torch.autograd._engine_run_backward is run_backward
    assert torch.autograd.graph._engine_run_backward is run_backward


def test_torchs_own_replacement_does_not_end_it():
    """torch.compiler replaces the same function for a while, by another way to its name."""
    if not hasattr(torch.compiler, "_patch_engine_backward"):
        pytest.skip("this torch does not")
    build()
    with torch.compiler._patch_engine_backward():
        pass
    loss, a, expected = product()
    loss.backward()
    assert torch.equal(a.grad, expected)
