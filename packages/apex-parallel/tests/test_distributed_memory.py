"""DistributedDataParallel and the memory of gradients: slots of buckets, and what users hold."""

import resource
import statistics

import pytest
import torch
from torch import nn

from apex.parallel import DistributedDataParallel
from apex_testkit.branches import Branches, every_mode, values


class Plain(nn.Module):
    """The sum of a function of each parameter."""

    def __init__(self, params, function):
        super().__init__()
        self.params, self.function = nn.ParameterList(params), function

    def forward(self, *arguments):
        return sum(self.function(param, *arguments).sum() for param in self.params)


def addresses(model):
    return [param.grad.data_ptr() for param in model.parameters()]


def check_kept(rank, world, numel):
    """Gradients that are kept stay where they are, whether set to zero or accumulated."""
    zeros = [torch.zeros(numel, dtype=torch.float64) for _ in range(3)]
    model = Plain(zeros, lambda param, factor: param * factor)
    ddp = DistributedDataParallel(model)
    ddp(1.0).backward()
    first = addresses(model)
    for step in range(3):
        ddp.zero_grad(set_to_none=False)
        ddp(float(rank + step)).backward()
        assert [param.grad.unique().tolist() for param in model.parameters()] == [[0.5 + step]] * 3
    with ddp.no_sync():
        ddp(1.0).backward()
    ddp(1.0).backward()
    assert model.params[2].grad.unique().tolist() == [4.5]
    assert addresses(model) == first
    for param in model.parameters():
        param.grad.detach_()  # as old training loops do before zero_()
    ddp.zero_grad()
    ddp(1.0).backward()
    assert addresses(model) == first  # the memory is not asked for again


@pytest.mark.parametrize("numel", [3, 100_000])  # below and above what is moved at once
def test_gradients_that_are_kept(two_ranks, numel):
    two_ranks(check_kept, numel=numel)


def check_held(rank, world, options):
    """What a user takes away from a parameter is the user's."""
    ddp = DistributedDataParallel(Branches(2), **options)
    held = []
    for step in range(3):
        ddp([0, 1], factor=rank + step).backward()
        held.append([param.grad for param in ddp.parameters()])
        ddp.zero_grad()
    assert [[g.tolist() for g in grads] for grads in held] == [
        [[0.5 + step] * 2] * 2 for step in range(3)
    ]
    ddp([0, 1]).backward()
    view = ddp.module.branches[0].grad[:1]
    ddp.zero_grad()
    ddp([0, 1], factor=rank).backward()
    assert view.tolist() == [1.0]


@every_mode
def test_gradients_that_users_hold(two_ranks, options):
    two_ranks(check_held, options=options)


def check_own_buffer(rank, world, options):
    """Gradients that are views of a buffer of the user's stay so."""
    ddp = DistributedDataParallel(Branches(3), **options)
    buffer = torch.zeros(6)
    for step in range(4):
        buffer.zero_()
        for i, param in enumerate(ddp.parameters()):
            if i < 2:
                param.grad = buffer[2 * i : 2 * i + 2]
        ddp([0, 1, 2], factor=rank + step).backward()
        assert buffer.tolist() == [0.5 + step] * 4 + [0.0] * 2
        assert values(ddp)[:2] == [0.5 + step] * 2
        ddp.zero_grad()


@pytest.mark.parametrize("options", [{}, {"message_size": 1}, {"delay_allreduce": True}], ids=str)
def test_gradients_in_a_buffer_of_the_users(two_ranks, options):
    two_ranks(check_own_buffer, options=options)


def check_create_graph(rank, world):
    """A gradient that can be differentiated stays so."""
    weight = nn.Parameter(torch.tensor([2.0 + rank]))
    ddp = DistributedDataParallel(Plain([weight], lambda param: param.pow(3)))
    for _ in range(2):
        ddp.zero_grad()
        ddp().backward(create_graph=True)
        assert weight.grad.item() == 12.0
        (second,) = torch.autograd.grad(weight.grad.sum(), weight)
        assert second.item() == 12.0


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_second_derivatives(two_ranks):
    two_ranks(check_create_graph)


def check_strides(rank, world, mixed):
    """Gradients have the strides of their parameters, unless ranks differ in those."""
    model = nn.Conv2d(3, 4, 3, bias=False).double()
    if not (mixed and rank):
        model = model.to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model)
    x = torch.randn(world, 2, 3, 5, 5, dtype=torch.float64, generator=torch.manual_seed(0))
    wanted = sum(torch.autograd.grad(model(batch).square().sum(), model.weight)[0] for batch in x)
    for to_none in (True, False, False):
        ddp(x[rank]).square().sum().backward()
        torch.testing.assert_close(model.weight.grad, wanted / world, rtol=1e-12, atol=1e-13)
        if not mixed:
            assert model.weight.grad.stride() == model.weight.stride()
        ddp.zero_grad(set_to_none=to_none)


@pytest.mark.parametrize("mixed", [False, True])
def test_channels_last(two_ranks, mixed):
    two_ranks(check_strides, mixed=mixed)


def check_shared_by_wrappers(rank, world, to_none):
    """Each wrapper must find the gradient as autograd made it, whenever its bucket leaves."""
    shared = nn.Parameter(torch.zeros(70_000))
    models = [Branches(3), Branches(3)]
    for model in models:
        model.branches[1] = shared
    first, second = (DistributedDataParallel(model, message_size=1) for model in models)
    for step in range(4):
        for wrapper in (first, second):
            wrapper.zero_grad(set_to_none=to_none)
        factor = float(rank + step)
        (first([0, 1, 2], factor=factor) + second([2, 1, 0], factor=factor)).backward()
        assert values(first) == [0.5 + step, 1 + 2 * step, 0.5 + step]
        assert shared.grad.unique().tolist() == [1 + 2 * step]


@pytest.mark.parametrize("to_none", [True, False])
def test_a_parameter_of_two_wrappers(two_ranks, to_none):
    two_ranks(check_shared_by_wrappers, to_none=to_none)


def check_unused(rank, world):
    """Kept gradients of parameters that no rank uses stay as they are, on each rank."""
    ddp = DistributedDataParallel(Branches(3))
    ddp([0, 1, 2]).backward()
    ddp.zero_grad(set_to_none=False)
    with torch.no_grad():
        ddp.module.branches[2].grad += rank + 0.25  # of the user's own making
    ddp([[0, 1], [0]][rank], factor=1 + rank).backward()
    assert values(ddp) == [1.5, 0.5, rank + 0.25]


def test_kept_gradients_that_no_rank_uses(two_ranks):
    two_ranks(check_unused)


def check_failure(rank, world):
    """A bucket in flight when backward fails cannot write into gradients any more."""
    ddp = DistributedDataParallel(Branches(3), message_size=1)
    for _ in range(2):
        ddp([0, 1, 2]).backward()
    for attempt in range(5):
        ddp.zero_grad(set_to_none=False)

        def fail(grad):
            raise ArithmeticError

        output = ddp([2, 1, 0])
        late = ddp.module.branches[0].clone()
        late.register_hook(fail)
        with pytest.raises(ArithmeticError):
            (output + late.sum()).backward()
        assert ddp._reducer.pending == []
        ddp.zero_grad(set_to_none=False)
        ddp([0, 1, 2], factor=rank + attempt).backward()
        assert values(ddp) == [0.5 + attempt] * 3


def test_kept_gradients_after_a_failure(two_ranks):
    two_ranks(check_failure)


def check_single_buckets(rank, world):
    """The two steps of Apex's reduction that a subclass may call itself."""
    ddp = DistributedDataParallel(Branches(2), gradient_predivide_factor=2.0)
    bucket = [torch.full((2,), rank + 1.0), torch.full((3, 1), 10.0 * (rank + 1))]
    flat = ddp.allreduce_bucket(bucket, 0, False)
    assert flat.tolist() == [1.5, 1.5, 15.0, 15.0, 15.0]
    assert bucket[0].tolist() == [rank + 1.0] * 2
    ddp.allreduce_maybe_retain(bucket, 1, force_default_stream=True)
    assert [bucket[0].tolist(), bucket[1].flatten().tolist()] == [[1.5] * 2, [15.0] * 3]
    assert ddp.allreduce_buffers == []
    ddp.retain_allreduce_buffers = True
    bucket[0] += rank
    ddp.allreduce_maybe_retain(bucket, 1)
    assert ddp.allreduce_buffers[0] is None
    assert ddp.allreduce_buffers[1].tolist() == [2.0, 2.0, 15.0, 15.0, 15.0]
    assert bucket[0].data_ptr() == ddp.allreduce_buffers[1].data_ptr()
    assert bucket[1].shape == (3, 1)


def test_single_buckets(two_ranks):
    two_ranks(check_single_buckets)


def check_page_faults(rank, world):
    """The memory of one gradient serves another, instead of going back to the system."""
    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]))
    faults = []
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        ddp.zero_grad()
        ddp(torch.ones(8, 1024)).sum().backward()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    # Weight gradients have 8,192 pages; now and then one of 1,024 is new.
    assert statistics.median(faults) < 4096, faults


def test_page_faults(two_ranks):
    two_ranks(check_page_faults)
