"""Cross entropy on a GPU: streams, CUDA graphs, several devices."""

import pytest
import torch

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex_testkit.gpu import (
    assert_captures,
    assert_repeatable,
    assert_runs_on_current_stream,
    assert_runs_on_other_device,
)


def xentropy(logits, labels):
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, -100)
    (grad,) = torch.autograd.grad(losses.square().sum(), logits)
    return [losses.detach(), grad]


# One group of lanes per row, and a block per row.
all_classes = pytest.mark.parametrize("classes", [1000, 32_003])


def values(device, classes, dtype=torch.float32):
    logits = torch.randn(129, classes, device=device).to(dtype).requires_grad_()
    return logits, torch.randint(1, classes, (129,), device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@all_classes
def test_is_repeatable(classes, dtype, device):
    assert_repeatable(xentropy, *values(device, classes, dtype))


@pytest.mark.needs_gpus(1)
@all_classes
def test_uses_the_current_stream(classes):
    assert_runs_on_current_stream(xentropy, *values("cuda", classes))


@pytest.mark.needs_gpus(1)
@all_classes
def test_in_a_graph(classes):
    assert_captures(xentropy, *values("cuda", classes))


@pytest.mark.needs_gpus(2)
def test_uses_the_device_of_its_tensors():
    assert_runs_on_other_device(xentropy, *values("cuda:0", 1000))
