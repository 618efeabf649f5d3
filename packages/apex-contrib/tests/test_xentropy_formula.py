"""What torch asks of SoftmaxCrossEntropyLoss beyond a forward and a backward."""

import pytest
import torch
import torch.nn.functional as F

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, decompositions
from apex.contrib.xentropy.ops import softmax_xentropy_backward, softmax_xentropy_forward
from apex_testkit.formulas import CHECKS, Case, check_sharded

PADDING = 2


def arguments(dtype, device, columns=5):
    logits = torch.randn(6, columns, device=device, dtype=dtype)
    labels = torch.randint(5, (6,), device=device)
    labels[1] = PADDING
    return logits, labels, 0.1, PADDING, False


def losses(logits, labels, smoothing, padding_idx, half_to_float):
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    return losses.masked_fill(labels == padding_idx, 0)


CASE = Case(
    SoftmaxCrossEntropyLoss.apply,
    arguments,
    losses,
    grads=(0,),
    rows=(0, 1),
    operators=(softmax_xentropy_forward, softmax_xentropy_backward),
    decompositions=decompositions,
    ulps=4,  # truth rounds as often as we do: exp, sum, quotient and product
    wide=arguments,
)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_formula(check, device):
    check(CASE, device)


def on_ranks(rank, world_size):
    check_sharded(CASE, rank, world_size)


def test_sharded(two_ranks):
    two_ranks(on_ranks)


def mixed_on_ranks(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    logits, labels, *options = arguments(torch.float32, "cpu")
    logits = distribute_tensor(logits, mesh, [Replicate()])
    with pytest.raises(TypeError, match="SoftmaxCrossEntropyLoss: if one operand is a DTensor"):
        SoftmaxCrossEntropyLoss.apply(logits, labels, *options)


def test_one_dtensor_among_tensors(two_ranks):
    two_ranks(mixed_on_ranks)


def test_empty(device):
    logits = torch.randn(0, 5, device=device, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.long, device=device)
    y = SoftmaxCrossEntropyLoss.apply(logits, labels)
    (gradient,) = torch.autograd.grad(y.sum(), logits, create_graph=True)
    assert y.shape == (0,)
    assert gradient.shape == (0, 5)


def test_signature_of_the_class():
    """As Apex's: trainers read it."""
    logits, labels, *options = arguments(torch.float32, "cpu")
    expected = SoftmaxCrossEntropyLoss.apply(logits, labels, *options)
    assert torch.equal(SoftmaxCrossEntropyLoss.forward(None, logits, labels, *options), expected)
