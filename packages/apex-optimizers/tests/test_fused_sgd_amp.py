"""FusedSGD with amp's master weights: one launch updates masters and the model's 16-bit copies."""

import types

import pytest
import torch

from apex.optimizers.fused_sgd import FusedSGD
from apex_testkit import assert_as_accurate_as
from apex_testkit.grids import HALVES
from apex_testkit.optimizers import sgd_reference

HYPER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}


def with_masters(models, wide, **options):
    """An optimizer as amp leaves it: masters and float32 parameters in its one group."""
    masters = [torch.nn.Parameter(m.detach().float()) for m in models]
    optimizer = FusedSGD([*masters, *wide], **HYPER, **options)
    optimizer._amp_stash = types.SimpleNamespace(
        fp16_groups=[models], fp32_from_fp16_groups=[masters], fp32_from_fp32_groups=[wide]
    )
    return optimizer, masters


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("dtype", [*HALVES, None], ids=str)
def test_masters_and_copies_follow_the_formula(dtype, materialize, device):
    """dtype None: both kinds of 16-bit parameters in one model."""
    dtypes = [dtype or torch.float16, dtype or torch.bfloat16]
    models = [
        torch.nn.Parameter(torch.randn(n, device=device, dtype=d))
        for n, d in zip((5, 257), dtypes, strict=True)
    ]
    wide = [torch.nn.Parameter(torch.randn(33, device=device))]
    optimizer, masters = with_masters(models, wide, materialize_master_grads=materialize)
    starts = [p.detach().clone() for p in (*masters, *wide)]
    scale = 1.0 if materialize else 64.0
    history = []
    for _ in range(3):
        # What reaches the optimizer: gradients of 16-bit values, scaled unless materialized.
        seen = [torch.randn_like(p) for p in (*models, *wide)]
        history.append([(g.float() / scale) for g in seen])
        for model, master, grad in zip(models, masters, seen, strict=False):
            model.grad, master.grad = (None, grad.float()) if materialize else (grad, None)
        wide[0].grad = seen[-1].clone()
        optimizer.most_recent_scale = scale
        optimizer.scale_set_by_backward = not materialize
        optimizer.step()
        assert optimizer.most_recent_scale == 1.0
        assert not optimizer.scale_set_by_backward
    for i, (p, start) in enumerate(zip((*masters, *wide), starts, strict=True)):
        own = [grads[i] for grads in history]
        # The parameter is rounded once in each of three steps.
        assert_as_accurate_as(
            lambda p, *g: sgd_reference(p, *g, **HYPER), p.detach(), start, *own, ulps=3
        )
        assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32
    for model, master in zip(models, masters, strict=True):
        assert torch.equal(model.detach(), master.detach().to(model.dtype))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_small_steps_collect_in_the_master(momentum, device):
    """1 - 1e-4 is 1 in bfloat16: only the float32 master keeps the difference."""
    model = torch.nn.Parameter(torch.ones(65, device=device, dtype=torch.bfloat16))
    optimizer, (master,) = with_masters([model], [])
    optimizer.param_groups[0].update(lr=1e-4, momentum=momentum, weight_decay=0.0, nesterov=False)
    for _ in range(100):
        master.grad = torch.ones_like(master)
        optimizer.step()
    grads = [torch.ones(65, device=device)] * 100
    assert_as_accurate_as(
        lambda p, *g: sgd_reference(p, *g, lr=1e-4, momentum=momentum),
        master.detach(),
        torch.ones(65, device=device),
        *grads,
        ulps=100,  # the master is rounded once in each of 100 steps
    )
    assert torch.equal(model.detach(), master.detach().bfloat16())
    assert model.detach().lt(1).all()


def test_masters_without_gradient_are_left_alone(device):
    models = [torch.nn.Parameter(torch.ones(3, device=device).half()) for _ in range(2)]
    optimizer, masters = with_masters(models, [])
    masters[1].grad = torch.ones_like(masters[1])
    optimizer.step()
    assert models[0].eq(1).all()
    assert masters[0].eq(1).all()
    assert models[1].ne(1).all()
    assert masters[0] not in optimizer.state


def test_the_layout_of_model_and_master_is_channels_last(device):
    model = torch.nn.Parameter(
        torch.randn(2, 3, 4, 5, device=device).half().to(memory_format=torch.channels_last)
    )
    optimizer, (master,) = with_masters([model], [], materialize_master_grads=False)
    start = master.detach().clone()
    model.grad = torch.randn(2, 3, 4, 5, device=device).half()  # contiguous
    optimizer.step()
    assert_as_accurate_as(
        lambda p, g: sgd_reference(p, g, **HYPER), master.detach(), start, model.grad.float()
    )
    assert torch.equal(model.detach(), master.detach().half())
