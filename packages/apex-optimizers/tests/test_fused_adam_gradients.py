"""Gradients of unusual kinds: decoupled, expanded, and negative by a bit."""

import pytest
import torch

from apex.optimizers import FusedAdam

DECOUPLED = {"lr": 0.1, "use_decoupled_grad": True}


def ones(device, dtype=torch.float32, shape=(4,)):
    return torch.nn.Parameter(torch.ones(shape, device=device, dtype=dtype))


def test_parameters_without_a_decoupled_gradient_are_skipped(device):
    params = [ones(device), ones(device)]
    optimizer = FusedAdam(params, **DECOUPLED)
    params[0].decoupled_grad = torch.ones(4, device=device)
    optimizer.step()
    assert params[0].ne(1).all()
    assert params[1].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoupled_gradients_of_several_dtypes_in_a_group(dtype, device):
    """Also where their dtypes change later."""
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    params = [ones(device, dtype) for _ in kinds]
    optimizer = FusedAdam(params, **DECOUPLED)
    for shift in range(3):
        for index, p in enumerate(params):
            p.decoupled_grad = torch.ones(4, device=device, dtype=kinds[(index + shift) % 3])
        optimizer.step()
    assert torch.equal(params[0], params[1])
    assert torch.equal(params[0], params[2])
    assert [float(optimizer.state[p]["step"]) for p in params] == [3.0] * 3


def test_decoupled_gradients_whose_dtypes_part_later(device):
    params = [ones(device), ones(device)]
    optimizer = FusedAdam(params, **DECOUPLED)
    for kinds in ([torch.float32] * 2, [torch.float32, torch.bfloat16]):
        for p, dtype in zip(params, kinds, strict=True):
            p.decoupled_grad = torch.ones(4, device=device, dtype=dtype)
        optimizer.step()
    assert torch.equal(*(p.detach() for p in params))


def test_smaller_decoupled_gradients_of_float64_parameters(device):
    params = [ones(device, torch.float64) for _ in range(2)]
    optimizer = FusedAdam(params, **DECOUPLED)
    params[0].decoupled_grad = torch.full((4,), 0.3, device=device)
    params[1].decoupled_grad = params[0].decoupled_grad.double()
    optimizer.step()
    assert torch.equal(*(p.detach() for p in params))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_decoupled_gradients_of_other_dtypes_change_nothing(dtype, device):
    params = [ones(device), ones(device)]
    optimizer = FusedAdam([{"params": [p]} for p in params], **DECOUPLED)
    params[0].decoupled_grad = torch.ones(4, device=device)
    params[1].decoupled_grad = torch.ones(4, device=device, dtype=dtype)
    with pytest.raises(RuntimeError, match="must be float32, float16 or bfloat16"):
        optimizer.step()
    assert params[0].eq(1).all()
    assert not optimizer.state


@pytest.mark.parametrize("steps", [0, 2])
def test_decoupled_gradients_of_another_shape(steps, device):
    """At the first step and later: kernels compare numbers of elements only."""
    param = ones(device, shape=(2, 3))
    optimizer = FusedAdam([param], **DECOUPLED)
    for _ in range(steps):
        param.decoupled_grad = torch.ones(2, 3, device=device)
        optimizer.step()
    param.decoupled_grad = torch.ones(3, 2, device=device)
    before = param.detach().clone()
    with pytest.raises(RuntimeError, match=r"differ: \[2, 3\] float32.*\[3, 2\] float32"):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("shape", [(1,), (3, 1), (1, 5), (3, 5)], ids=str)
def test_expanded_gradients_are_unscaled_with_capturable(shape, device):
    param, plain = ones(device, shape=(3, 5)), ones(device, shape=(3, 5))
    gradient = torch.arange(1.0, 1 + torch.Size(shape).numel(), device=device).view(shape)
    optimizer = FusedAdam([param], lr=0.1, capturable=True)
    optimizer.grad_scale = torch.tensor(4.0, device=device)
    param.grad = (4 * gradient).expand(3, 5)
    optimizer.step()
    reference = FusedAdam([plain], lr=0.1, capturable=True)
    plain.grad = gradient.expand(3, 5).contiguous()
    reference.step()
    assert torch.equal(param, plain)
    assert torch.equal(param.grad, plain.grad)
    assert optimizer.state[param]["step"].item() == 1


@pytest.mark.parametrize("capturable", [False, True])
def test_kept_gradients_that_are_negative_by_a_bit(capturable, device):
    """Complex expressions leave such gradients; C++ would hold a copy of what they were once."""
    params, plain = ([ones(device, shape=()) for _ in range(40)] for _ in range(2))
    optimizer, reference = (FusedAdam(ps, lr=0.1, capturable=capturable) for ps in (params, plain))
    bases = [torch.ones((), device=device) for _ in params]
    for p, base in zip(params, bases, strict=True):
        p.grad = torch._neg_view(base)
    for step in range(6):
        for p, base in zip(plain, bases, strict=True):
            base.fill_(step - 2.5)
            p.grad = -base
        optimizer.step()
        reference.step()
    assert all(p.grad.is_neg() for p in params)
    assert all(torch.equal(p, q) for p, q in zip(params, plain, strict=True))
