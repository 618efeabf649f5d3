"""DistributedDataParallel: gradients that come late, go, or change their dtype."""

import weakref

import pytest
import torch

from apex.parallel import DistributedDataParallel, Reducer
from apex_testkit.branches import Branches, every_mode, values


def check_frozen_between(rank, world, options):
    """The graph of the first forward brings gradients that the second one froze."""
    ddp = DistributedDataParallel(Branches(2), **options)
    for _ in range(2):  # in the recording iteration, and in later ones
        output = ddp([0], factor=rank)
        ddp.module.branches[0].requires_grad_(False)
        ddp([1], factor=rank).backward()
        assert values(ddp) == [None, (world - 1) / 2]
        ddp.module.branches[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match="backward without a forward"):
            output.backward()
        output = ddp([0])
        ddp.module.branches[0].requires_grad_(False)
        ddp([1])
        ddp.module.branches[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"shape \[2\] got a gradient, but was frozen"):
            output.backward()
        ddp.zero_grad()
        ddp([0, 1], factor=rank).backward()
        assert values(ddp) == [(world - 1) / 2] * 2
        ddp.zero_grad()


@every_mode
def test_freezing_between_forward_and_backward(two_ranks, options):
    two_ranks(check_frozen_between, options=options)


def check_frozen_still(rank, world, options):
    """torch calls hooks of a frozen parameter too, but adds nothing to its gradient."""
    average = (world - 1) / 2
    ddp = DistributedDataParallel(Branches(2), **options)
    for _ in range(2):
        ddp([0, 1], factor=rank).backward()
        output = ddp([0, 1], factor=rank)
        ddp.module.branches[0].requires_grad_(False)
        ddp([1])
        output.backward()
        assert values(ddp) == [average, 2 * average]
        ddp.module.branches[0].requires_grad_(True)
        ddp.zero_grad()


@every_mode
def test_a_graph_through_a_frozen_parameter(two_ranks, options):
    two_ranks(check_frozen_still, options=options)


def check_discarded(rank, world, options):
    ddp = DistributedDataParallel(Branches(3), **options)
    for _ in range(2):
        ddp.disable_allreduce()
        ddp([0, 1]).backward()
        ddp.zero_grad()
        ddp.enable_allreduce()
        ddp([0, 2]).backward()
        assert values(ddp) == [1.0, None, 1.0]
        ddp.zero_grad()


@every_mode
def test_discarded_gradients_stay_away(two_ranks, options):
    two_ranks(check_discarded, options=options)


def check_memory(rank, world, options):
    """After a backward nothing but the parameters holds gradients, reduced or not."""
    ddp = DistributedDataParallel(Branches(2), **options)
    arrived = []
    for param in ddp.parameters():
        param.register_post_accumulate_grad_hook(lambda p: arrived.append(weakref.ref(p.grad)))
    for step in (1, 2):
        ddp([0, 1]).backward()
        ddp.zero_grad()
        assert len(arrived) == 2 * step
        assert all(grad() is None for grad in arrived)


@every_mode
def test_gradients_are_let_go(two_ranks, options):
    two_ranks(check_memory, options=options)


def check_dtype_change(rank, world, options):
    ddp = DistributedDataParallel(Branches(3), **options)
    for dtype in (torch.float32, torch.float64, torch.float32):
        ddp.module.branches[1].data = ddp.module.branches[1].data.to(dtype)
        for _ in range(2):
            ddp.zero_grad()
            ddp([0, 1, 2], factor=rank).backward()
            assert values(ddp) == [(world - 1) / 2] * 3
            assert ddp.module.branches[1].grad.dtype == dtype


@every_mode
def test_dtype_of_a_part_may_change(two_ranks, options):
    two_ranks(check_dtype_change, options=options)


def check_grad_dtype(rank, world, options):
    """16-bit parameters with float32 gradients, beside others; ranks use different ones."""
    model = Branches(3).bfloat16()
    for param in model.branches[:2]:
        param.grad_dtype = torch.float32
    ddp = DistributedDataParallel(model, **options)
    for _ in range(2):
        ddp.zero_grad()
        ddp([[0, 2], [1, 2]][rank]).backward()
        assert values(ddp) == [0.5, 0.5, 1.0]
        wanted = [torch.float32, torch.float32, torch.bfloat16]
        assert [param.grad.dtype for param in model.branches] == wanted


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype"
)
@every_mode
def test_gradients_wider_than_parameters(two_ranks, options):
    two_ranks(check_grad_dtype, options=options)


def check_default_device(rank, world, options):
    """Numbers that ranks exchange lie where the parameters do, whatever device is the default."""
    ddp = DistributedDataParallel(Branches(2), **options)
    model, late = Branches(2), Branches(2)
    model.branches[0].grad = torch.full([2], 4.0) if rank == 0 else None
    model.branches[0].requires_grad_(False)
    with torch.device("meta"):
        reducer = Reducer(model)
        model([1], factor=rank).backward()
        reducer.reduce()
        for wrapper in (ddp, ddp, DistributedDataParallel(late, **options)):
            wrapper.zero_grad()
            wrapper([0, 1], factor=rank).backward()
            assert values(wrapper) == [(world - 1) / 2] * 2
    assert [param.grad.tolist() for param in model.branches] == [[2.0] * 2, [0.5] * 2]


@every_mode
def test_another_default_device(two_ranks, options):
    two_ranks(check_default_device, options=options)
