"""Several models, optimizers and losses; an overflow anywhere is as if its step were left out."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _amp_state

# The models that each of three losses reaches.
REACHES = ((0,), (0, 1), (1,))
ITERATIONS = 5


def networks():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)) for _ in range(2)]


def make_optimizers(models, joint):
    """One optimizer for both models, or one each."""
    sgd = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)
    if joint:
        return [
            sgd([{"params": m.parameters(), "lr": 0.1 / (i + 1)} for i, m in enumerate(models)])
        ]
    return [sgd(model.parameters()) for model in models]


def poison(model):
    def hook(grad):
        handle.remove()
        return grad * float("inf")

    handle = model[0].weight.register_hook(hook)


def train(level, joint, num_losses, bad=None, left_out=None):
    """Values after training; ``bad`` is (iteration, loss), ``left_out`` (iteration, optimizers)."""
    models = networks()
    optimizers = make_optimizers(models, joint)
    models, optimizers = amp.initialize(
        models,
        optimizers,
        opt_level=level,
        verbosity=0,
        num_losses=num_losses,
        loss_scale="dynamic",
    )
    for scaler in _amp_state.loss_scalers:
        scaler._loss_scale = 1024.0
    for model in models:
        model.eval()  # running statistics see every batch, also that of a step left out
    for iteration in range(ITERATIONS):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(iteration))
        for optimizer in optimizers:
            optimizer.zero_grad()
        for index, reached in enumerate(REACHES):
            loss = sum(F.cross_entropy(models[i](x).float(), torch.arange(16) % 4) for i in reached)
            if (iteration, index) == bad:
                poison(models[reached[-1]])
            used = optimizers if joint else [optimizers[i] for i in reached]
            loss_id = index if num_losses > 1 else 0
            with amp.scale_loss(loss * (index + 1), used, loss_id=loss_id) as scaled_loss:
                scaled_loss.backward()
        for index, optimizer in enumerate(optimizers):
            if left_out is None or iteration != left_out[0] or index not in left_out[1]:
                optimizer.step()
    masters = [p for optimizer in optimizers for p in amp.master_params(optimizer)]
    scales = [scaler.loss_scale() for scaler in _amp_state.loss_scalers]
    return copy.deepcopy([p.detach() for p in masters]), scales


@pytest.mark.parametrize("num_losses", [1, 3])
@pytest.mark.parametrize("joint", [True, False], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_an_overflow_leaves_out_the_steps_of_its_optimizers(level, joint, num_losses):
    for bad_loss, reached in enumerate(REACHES):
        skipped = (0,) if joint else reached
        actual, scales = train(level, joint, num_losses, bad=(2, bad_loss))
        expected, _ = train(level, joint, num_losses, left_out=(2, skipped))
        for a, e in zip(actual, expected, strict=True):
            # Half the scale rounds gradients below 2^-24 / scale elsewhere in float16.
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
        halved = [1024.0] * num_losses
        halved[bad_loss if num_losses > 1 else 0] = 512.0
        assert scales == halved
        full, _ = train(level, joint, num_losses)
        assert any(not torch.allclose(a, f, atol=1e-3) for a, f in zip(actual, full, strict=True))


@pytest.mark.parametrize("levels", ["O1 O1", "O2 O2", "O4 O4", "O2 O1", "O1 O2", "O2 O4", "O5 O0"])
def test_a_call_of_initialize_for_each_model(levels):
    """As scripts with two networks do it; the casts and the loss scalers are those of the last."""
    pairs = []
    for model, level in zip(networks(), levels.split(), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pairs.append(amp.initialize(model, optimizer, opt_level=level, verbosity=0))
    assert len(_amp_state.loss_scalers) == 1
    x, y = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4
    losses = []
    for _ in range(10):
        losses.append([])
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float(), y)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert all(last < 0.9 * first for first, last in zip(losses[0], losses[-1], strict=True))
    (first, _), (second, _) = pairs
    last = {"O1": torch.float16, "O4": torch.bfloat16}.get(levels.split()[1], torch.float32)
    assert second(x).dtype is last
    assert first(x).dtype is (torch.float32 if levels.startswith(("O2", "O5")) else last)
