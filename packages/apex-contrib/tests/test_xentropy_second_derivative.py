"""Gradients with create_graph=True, which a formula gives in place of the kernel."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex_testkit import FLOATS, assert_as_accurate_as

paddings = pytest.mark.parametrize("padding_idx", [None, 2, -100])


def inputs(shape, dtype, device, padding_idx=None):
    """Logits, labels with one of padding, and a gradient of the losses."""
    rows, classes = shape
    logits = torch.randn(rows, classes, device=device).mul(3).to(dtype)
    labels = torch.randint(classes, (rows,), device=device)
    labels[1] = 2 if padding_idx is None else padding_idx
    return logits, labels, torch.randn(rows, device=device).to(dtype)


def torch_losses(logits, labels, smoothing, padding_idx):
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    return losses if padding_idx is None else losses.masked_fill(labels == padding_idx, 0)


def test_compiled_backward_is_the_kernel(device):
    targets = []

    def remember(graph, _):
        targets.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    logits, labels, _ = inputs((8, 100), torch.float32, device)
    loss = torch.compile(
        lambda x: SoftmaxCrossEntropyLoss.apply(x, labels).sum(),
        backend=aot_autograd(fw_compiler=remember, bw_compiler=remember),
        fullgraph=True,
    )
    loss(logits.requires_grad_()).backward()
    assert torch.ops.apex_contrib.softmax_xentropy_backward.default in targets


@pytest.mark.parametrize("half_to_float", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@paddings
def test_gradient(padding_idx, dtype, half_to_float, device):
    if half_to_float and dtype.itemsize > 2:
        pytest.skip("for 16-bit logits")
    logits, labels, grads = inputs((16, 7), dtype, device, padding_idx)
    losses = SoftmaxCrossEntropyLoss.apply(
        logits.requires_grad_(), labels, 0.1, padding_idx, half_to_float
    )
    actual = torch.autograd.grad(losses, logits, grads.to(losses.dtype), create_graph=True)

    def reference(logits, grads):
        logits = logits.detach().requires_grad_()
        return torch.autograd.grad(torch_losses(logits, labels, 0.1, padding_idx), logits, grads)

    # Of float64, truth rounds as often as we do: exp, sum, quotient and product.
    ulps = 4 if dtype == torch.float64 else 1
    assert_as_accurate_as(reference, actual, logits.detach(), grads, ulps=ulps)
    assert actual[0].dtype == dtype


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@paddings
def test_second_derivative(padding_idx, smoothing, device):
    """Also where the gradient of the losses is a constant, as in a gradient penalty."""
    logits, labels, _ = inputs((6, 5), torch.float64, device, padding_idx)
    loss = lambda x: SoftmaxCrossEntropyLoss.apply(x, labels, smoothing, padding_idx)
    assert torch.autograd.gradgradcheck(loss, logits.requires_grad_())

    def penalty_gradient(losses_of):
        losses = losses_of(logits, labels, smoothing, padding_idx)
        (first,) = torch.autograd.grad(losses.mean(), logits, create_graph=True)
        return torch.autograd.grad(first.square().sum(), logits)[0]

    actual = penalty_gradient(SoftmaxCrossEntropyLoss.apply)
    assert actual.abs().max() > 1e-3
    torch.testing.assert_close(actual, penalty_gradient(torch_losses), rtol=1e-12, atol=1e-14)


def test_forward_mode_through_the_gradient(device):
    """Without create_graph, where the kernel would drop the tangent of its gradient."""
    logits, labels, grads = inputs((6, 5), torch.float64, device)
    logits.requires_grad_()

    def tangent(losses_of):
        losses = losses_of(logits, labels, 0.1, None)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(grads, grads.cos())
            (first,) = torch.autograd.grad(losses, logits, dual)
            return forward_ad.unpack_dual(first).tangent

    torch.testing.assert_close(tangent(SoftmaxCrossEntropyLoss.apply), tangent(torch_losses))


def test_padded_rows_may_hold_anything(device):
    logits, labels, _ = inputs((4, 7), torch.float32, device, padding_idx=0)
    labels[2:] = 3
    logits[1] = torch.nan
    losses = SoftmaxCrossEntropyLoss.apply(logits.requires_grad_(), labels)
    (first,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), logits)
    for values in (first, second):
        assert (values[1] == 0).all()
        assert values.isfinite().all()
