"""FP16_Optimizers of two wheels know each other: a parameter has the masters of the newest one."""

import pickle

import pytest
import torch
from torch import nn

from apex import fp16_utils
from apex.contrib.optimizers import FP16_Optimizer
from apex.contrib.optimizers.fused_sgd import FusedSGD


def of_amp(params):
    return fp16_utils.FP16_Optimizer(torch.optim.SGD(params, lr=0.5), verbose=False)


def of_contrib(params):
    return FP16_Optimizer(FusedSGD(params, lr=0.5))


def step(model, optimizer):
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(2, 4).half()).float().sum())
    optimizer.step()


@pytest.mark.parametrize("makers", [(of_amp, of_contrib), (of_contrib, of_amp)])
def test_the_older_one_is_refused(makers):
    model = nn.Linear(4, 4).half()
    old, new = (make(list(model.parameters())) for make in makers)
    step(model, new)
    before = pickle.dumps(model)  # owners are no part of a model's file
    with pytest.raises(RuntimeError, match="belong to a newer FP16_Optimizer, which was built"):
        step(model, old)
    assert all(map(torch.equal, model.parameters(), pickle.loads(before).parameters()))
    step(model, new)
