"""Several owners of one gradient: two wrappers of a module, a wrapper in a wrapper, a Reducer."""

import pytest
import torch
from torch import nn

from apex.parallel import DistributedDataParallel, Reducer

WANTED = 1.5  # the average of the ranks' gradients, 1 and 2


def net():
    return nn.Linear(1, 1, bias=False)


def inputs(rank):
    return torch.full((1, 1), rank + 1.0)


def gradients(module, step, steps=3):
    """Of the recording backward, and of those with buckets."""
    found = []
    for _ in range(steps):
        module.zero_grad()
        step()
        found.append(module.weight.grad.item())
    return found


def check_two_wrappers(rank, world, options, factor):
    """The one that has had the forward reduces; the other, kept alive by somebody, stays out."""
    x, module = inputs(rank), net()
    first, second = (DistributedDataParallel(module, **options) for _ in range(2))

    def accumulated(ddp):
        with ddp.no_sync():
            ddp(x).sum().backward()
        ddp(x).sum().backward()

    for ddp in (second, first, second):
        wanted = [WANTED * factor] * 3
        assert gradients(module, lambda ddp=ddp: ddp(x).sum().backward()) == wanted
        assert gradients(module, lambda ddp=ddp: accumulated(ddp)) == [2 * w for w in wanted]
    with pytest.raises(RuntimeError, match="something else has wrapped the same module"):
        module(x).sum().backward()  # of neither
    first.disable_allreduce()
    assert gradients(module, lambda: second(x).sum().backward()) == wanted


@pytest.mark.parametrize("delays", [False, True])
def test_two_wrappers(two_ranks, delays):
    two_ranks(check_two_wrappers, options={"delay_allreduce": delays}, factor=1)
    sums = {"delay_allreduce": delays, "gradient_average": False}
    two_ranks(check_two_wrappers, options=sums, factor=2)


def check_both_at_once(rank, world):
    """Two averages are one; two sums are refused before the backward."""
    x = inputs(rank)
    module = net()
    outer = DistributedDataParallel(DistributedDataParallel(module))
    assert gradients(module, lambda: outer(x).sum().backward()) == [WANTED] * 3
    module = net()
    first, second = (DistributedDataParallel(module) for _ in range(2))
    step = lambda: (first(x) + second(x)).sum().backward()
    assert gradients(module, step) == [2 * WANTED] * 3

    sums = {"gradient_average": False}
    inner = DistributedDataParallel(net(), **sums)
    outer = DistributedDataParallel(inner, **sums)
    with pytest.raises(RuntimeError, match="gradients would be summed over the ranks twice"):
        outer(x)
    inner.disable_allreduce()
    module = inner.module
    assert gradients(module, lambda: outer(x).sum().backward()) == [2 * WANTED] * 3


def check_reducer(rank, world):
    """What the wrapper has averaged, a Reducer finds the same on all ranks."""
    x, module = inputs(rank), net()
    ddp, reducer, other = DistributedDataParallel(module), Reducer(module), Reducer(module)

    def reduced():
        ddp(x).sum().backward()
        reducer.reduce()

    def by_reducers():
        with ddp.no_sync():
            ddp(x).sum().backward()
        reducer.reduce()
        other.reduce()

    def by_both():
        by_reducers()
        ddp(x).sum().backward()

    assert gradients(module, reduced) == [WANTED] * 3
    assert gradients(module, by_reducers) == [WANTED] * 3
    assert gradients(module, by_both) == [2 * WANTED] * 3


def test_both_at_once(two_ranks):
    two_ranks(check_both_at_once)


def test_reducer_beside_a_wrapper(two_ranks):
    two_ranks(check_reducer)
