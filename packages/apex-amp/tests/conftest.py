"""Every test of amp starts and ends without amp's process-wide state."""

import importlib
import importlib.util

import pytest
import torch

from apex_testkit.fresh_amp import fresh_amp  # noqa: F401  (fixture)

FUSED_ARGUMENTS = {
    "FusedSGD": ("FusedSGD", {}),
    "FusedSGD that unscales": ("FusedSGD", {"materialize_master_grads": False}),
    "FusedAdam": ("FusedAdam", {}),
}


@pytest.fixture(params=["SGD", "Adam", *FUSED_ARGUMENTS])
def make_optimizer(request):
    """Makes an optimizer of parameters: torch's, and those of the sibling wheel if it is there."""
    name, kwargs = FUSED_ARGUMENTS.get(request.param, (request.param, {}))
    module = torch.optim
    if request.param in FUSED_ARGUMENTS:
        if importlib.util.find_spec("apex.optimizers") is None:
            pytest.skip("apex-optimizers is not installed; apex-amp works with it, and without")
        module = importlib.import_module("apex.optimizers")
    if name.endswith("SGD"):
        kwargs = {**kwargs, "momentum": 0.9}
    return lambda params, lr=0.125: getattr(module, name)(params, lr=lr, **kwargs)
