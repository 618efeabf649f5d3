"""Tensors of more than 2^31 elements. Zeros stay zeros in all operations here."""

import pytest
import torch

from apex.multi_tensor_apply import (
    multi_tensor_l2norm,
    multi_tensor_l2norm_scale,
    multi_tensor_scale,
)
from apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedLARS, FusedNovoGrad, FusedSGD
from apex_testkit.huge import huge_zeros, needs_linux

ELEMENTS = 2**31 + 70_003

pytestmark = [pytest.mark.slow, needs_linux]


def huge(tail, dtype=None):
    tensor = huge_zeros(ELEMENTS, dtype or tail.dtype)
    tensor[-tail.numel() :] = tail
    return tensor


TAIL = 1000
OPTIMIZERS = {
    "adagrad": (FusedAdagrad, {"lr": 0.1}, ["sum"]),
    "adam": (FusedAdam, {"lr": 0.1}, ["exp_avg", "exp_avg_sq"]),
    "lamb": (FusedLAMB, {"lr": 0.1, "max_grad_norm": 0.0}, ["exp_avg", "exp_avg_sq"]),
    "lars": (FusedLARS, {"lr": 0.1, "momentum": 0.9}, ["momentum_buffer"]),
    "novograd": (FusedNovoGrad, {"lr": 0.1}, ["exp_avg"]),
    "sgd": (FusedSGD, {"lr": 0.1}, []),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name):
    """The tail is updated as a small parameter would be; norms see nothing but the tail."""
    cls, options, moments = OPTIMIZERS[name]
    value, grad = torch.randn(TAIL).half(), torch.randn(TAIL).half()
    small = torch.nn.Parameter(value.clone())
    param = torch.nn.Parameter(huge(value))
    param.grad, small.grad = huge(grad), grad.clone()
    optimizer, plain = cls([param], **options), cls([small], **options)
    plain.step()
    state = optimizer.state[param]
    for key in moments:  # as the first step would make them, in memory that there is
        like = plain.state[small][key]
        state[key] = huge(torch.zeros(TAIL), like.dtype)
    optimizer.step()
    # Norms of the small one are added up in another order; half precision hides all but ties.
    torch.testing.assert_close(param.detach()[-TAIL:], small.detach(), rtol=2**-10, atol=2**-20)
    assert not torch.equal(param.detach()[-TAIL:], value)
    assert param.detach()[-TAIL - 5 : -TAIL].eq(0).all()


def test_multi_tensor_ops():
    x, flag = huge(torch.randn(TAIL).half()), torch.zeros(1, dtype=torch.int32)
    y = huge_zeros(ELEMENTS, torch.float16)
    multi_tensor_scale([x], [y], flag, 0.5)
    assert torch.equal(y[-TAIL:], x[-TAIL:] * 0.5)
    expected = x[-TAIL:].double().norm()
    norm, _ = multi_tensor_l2norm([x], flag)
    torch.testing.assert_close(norm[0].double(), expected, rtol=1e-6, atol=0)
    norm, _ = multi_tensor_l2norm_scale([x], [y], flag, 2.0)
    torch.testing.assert_close(norm[0].double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(y[-TAIL:], x[-TAIL:] * 2)
    assert flag.item() == 0
    x[-3] = float("nan")
    multi_tensor_scale([x], [y], flag, 0.5)
    assert flag.item() == 1
