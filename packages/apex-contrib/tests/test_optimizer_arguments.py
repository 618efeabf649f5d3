"""What the optimizers say where they are given a model instead of its parameters."""

import pytest
import torch

from apex.contrib.optimizers import FusedAdam, FusedLAMB
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.contrib.optimizers.fused_sgd import FusedSGD

KINDS = (FusedAdam, FusedLAMB, FusedSGD, DistributedFusedAdam, DistributedFusedLAMB)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_has_parameters(kind):
    text = rf"{kind.__name__}: params is a Linear; pass its parameters: model\.parameters\(\)\.$"
    with pytest.raises(TypeError, match=text):
        kind(torch.nn.Linear(2, 2), lr=0.1)


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedSGD])
def test_a_list_that_is_a_module(kind):
    listed = torch.nn.ParameterList(torch.nn.Linear(2, 2).parameters())
    assert kind(listed, lr=0.1).param_groups[0]["params"] == list(listed)
