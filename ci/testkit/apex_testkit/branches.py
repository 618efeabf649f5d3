"""A model whose parts are used at will, for tests of DistributedDataParallel."""

import pytest
import torch
from torch import nn

MODES = {
    "buckets": {"message_size": 1},
    "one bucket": {},
    "delayed": {"delay_allreduce": True},
    "retained": {"retain_allreduce_buffers": True, "message_size": 4},
}
every_mode = pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())


class Branches(nn.Module):
    """y = sum of p_i over the branches used; d y / d p_i = 1."""

    def __init__(self, count=4):
        super().__init__()
        self.branches = nn.ParameterList([torch.zeros(2) for _ in range(count)])

    def forward(self, used, factor=1.0):
        return sum((self.branches[i] * factor).sum() for i in used)


def values(ddp):
    """The gradient of each branch as a number, None where there is none."""
    grads = [param.grad for param in ddp.module.branches]
    assert all(grad is None or grad[0] == grad[1] for grad in grads)
    return [None if grad is None else grad[0].item() for grad in grads]
