"""FusedSGD with amp's master weights: one launch updates masters and the model's 16-bit copies."""

import pytest
import torch

from apex.optimizers.fused_sgd import FusedSGD
from apex_testkit import assert_as_accurate_as
from apex_testkit.amp_masters import check_masters_and_copies, with_masters
from apex_testkit.grids import HALVES
from apex_testkit.optimizers import sgd_reference

HYPER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}


def masters_of(models, **options):
    return with_masters(FusedSGD, models, [], **HYPER, **options)


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("dtype", [*HALVES, None], ids=str)
def test_masters_and_copies_follow_the_formula(dtype, materialize, device):
    check_masters_and_copies(FusedSGD, sgd_reference, HYPER, dtype, materialize, device)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_small_steps_collect_in_the_master(momentum, device):
    """1 - 1e-4 is 1 in bfloat16: only the float32 master keeps the difference."""
    model = torch.nn.Parameter(torch.ones(65, device=device, dtype=torch.bfloat16))
    optimizer, (master,) = masters_of([model])
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
    optimizer, masters = masters_of(models)
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
    optimizer, (master,) = masters_of([model], materialize_master_grads=False)
    start = master.detach().clone()
    model.grad = torch.randn(2, 3, 4, 5, device=device).half()  # contiguous
    optimizer.step()
    assert_as_accurate_as(
        lambda p, g: sgd_reference(p, g, **HYPER), master.detach(), start, model.grad.float()
    )
    assert torch.equal(model.detach(), master.detach().half())
