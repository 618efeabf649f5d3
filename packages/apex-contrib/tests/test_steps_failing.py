"""A launch that fails after it has written is not made again by the optimizers given lists."""

import importlib

import pytest
import torch

from apex.contrib.openfold_triton.fused_adam_swa import FusedAdamSWA
from apex.contrib.optimizers import FusedAdam
from apex.contrib.optimizers.fused_sgd import FusedSGD

MODULES = {
    "adam": "optimizers.fused_adam",
    "sgd": "optimizers.fused_sgd",
    "swa": "openfold_triton.fused_adam_swa",
}


def make(kind, device):
    """A step, and all that it writes to."""
    masters = [torch.ones(n, device=device) for n in (5, 70)]
    models = [p.to(torch.bfloat16, copy=True) for p in masters]
    for model in models:
        model.grad = torch.full_like(model, 0.5)
    grads = [model.grad for model in models]
    if kind == "swa":
        averages = [torch.zeros_like(p) for p in masters]
        return FusedAdamSWA(
            masters, models, averages, 0.9, lr=0.1
        ).step, masters + models + averages
    optimizer = FusedAdam(masters) if kind == "adam" else FusedSGD(masters, lr=0.1, momentum=0.9)
    return lambda: optimizer.step(grads=grads, output_params=models, scale=2.0), masters + models


@pytest.mark.parametrize("kind", MODULES)
def test_an_error_after_the_launch_is_not_answered_by_another(kind, monkeypatch, device):
    """The device may be lost by then; what was written must not be written once more."""
    (step, written), (reference, expected) = (make(kind, device) for _ in range(2))
    for _ in range(2):
        step()
        reference()
    reference()
    module = importlib.import_module(f"apex.contrib.{MODULES[kind]}")
    launch = module.call_counted

    def failing(*arguments):
        launch(*arguments)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(module, "call_counted", failing)
    with pytest.raises(RuntimeError, match="the device is lost"):
        step()
    assert all(map(torch.equal, written, expected))
