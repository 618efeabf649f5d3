"""Gradients that are the same tensors in every step stay in C++; others are never kept alive."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from apex.optimizers import FusedAdagrad, FusedAdam, FusedSGD
from apex.optimizers.fused_adagrad.optimizer import ADAGRAD
from apex.optimizers.fused_adam.buckets import ADAM
from apex.optimizers.fused_sgd.optimizer import SGD
from apex.optimizers.stepping import held_lists
from apex_testkit.held_lists import PlainLists

COUNT = held_lists.MIN_TENSORS + 3
KINDS = {
    "adam": (FusedAdam, ADAM.held),
    "sgd": (partial(FusedSGD, momentum=0.9), SGD.held),
    "adagrad": (FusedAdagrad, ADAGRAD.held),
}


class Run:
    """An optimizer of tiny matrices, random gradients, and how many lots of lists it has held."""

    def __init__(self, kind, device):
        gc.collect()
        self.like = torch.empty(0, device=device)
        self.ops = KINDS[kind][1]
        self.others = self.ops.count(self.like)
        self.generator = torch.Generator().manual_seed(1)
        self.params = [torch.nn.Parameter(self.random()) for _ in range(COUNT)]
        self.optimizer = KINDS[kind][0](self.params, lr=0.1)

    def random(self):
        return torch.randn(4, 3, generator=self.generator).to(self.like.device)

    def renew(self, steps):
        for _ in range(steps):
            for p in self.params:
                p.grad = None
            for p in self.params:
                p.grad = self.random()
            self.optimizer.step()

    def overwrite(self, steps):
        for _ in range(steps):
            for p in self.params:
                p.grad.copy_(self.random())
            self.optimizer.step()

    @property
    def lots(self):
        return self.ops.count(self.like) - self.others


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def compare_with_plain(kind, device, use):
    """The same parameters come out of ``use(run)`` whether lists are held or not."""
    results = []
    for lists in (nullcontext(), PlainLists()):
        with lists:
            run = Run(kind, device)
            use(run)
            results.append([p.detach().clone() for p in run.params])
            del run
    assert all(map(torch.equal, *results))


def holds(run, lots):
    """Whether that many lots are held; none where lists are plain."""
    return run.lots == (lots if held_lists.MIN_TENSORS <= COUNT else 0)


def test_same_bits_with_gradients_that_stay(kind, device):
    def use(run):
        run.renew(1)
        run.overwrite(6)
        assert holds(run, 2)

    compare_with_plain(kind, device, use)
    run = Run(kind, device)
    run.renew(1)
    run.overwrite(6)
    assert run.lots == 2
    del run.params, run.optimizer
    gc.collect()
    assert run.lots == 0


def test_gradients_that_are_renewed_die_at_once(kind, device):
    run = Run(kind, device)
    for _ in range(6):
        run.renew(1)
        watched = weakref.ref(run.params[0].grad)
        for p in run.params:
            p.grad = None
        assert watched() is None
    assert run.lots == 1


def test_change_from_one_to_the_other_and_back(kind, device):
    def use(run):
        run.renew(1)
        run.overwrite(4)
        watched = weakref.ref(run.params[3].grad)
        run.renew(2)
        assert watched() is None
        assert holds(run, 1)
        run.overwrite(3)
        assert holds(run, 2)

    compare_with_plain(kind, device, use)


def other_memory(run):
    run.params[2].grad.data = run.random()


def other_tensor(run):
    run.params[2].grad = run.random()


def other_layout(run):
    run.params[2].grad = torch.arange(12.0, device=run.like.device).view(3, 4).t()


def other_layout_in_place(run):
    run.params[2].grad.data = torch.arange(12.0, device=run.like.device).view(3, 4).t()


def none(run):
    run.params[2].grad = None
    run.optimizer.step()
    run.params[2].grad = run.random()


@pytest.mark.parametrize(
    "change",
    [other_memory, other_tensor, other_layout, other_layout_in_place, none],
    ids=lambda change: change.__name__,
)
def test_what_is_replaced_is_noticed(kind, change, device):
    def use(run):
        run.renew(1)
        run.overwrite(4)
        change(run)
        run.optimizer.step()
        run.overwrite(3)

    compare_with_plain(kind, device, use)


def test_a_gradient_that_does_not_fit_changes_nothing(kind, device):
    run = Run(kind, device)
    run.renew(1)
    run.overwrite(4)
    before = [p.detach().clone() for p in run.params]
    run.params[5].grad.data = torch.ones(5, 3, device=device)
    with pytest.raises(RuntimeError, match=r"parameter 5 .*\[5, 3\]"):
        run.optimizer.step()
    run.params[5].grad = run.random().to_sparse()
    with pytest.raises(RuntimeError, match="gradient of parameter 5 is sparse"):
        run.optimizer.step()
    assert all(map(torch.equal, before, run.params))


@pytest.mark.parametrize("link", ["attribute", "graph"])
def test_gradients_that_lead_elsewhere_are_not_held(kind, link, device):
    """C++ is no place for them: the cycle collector cannot look into it."""
    run = Run(kind, device)
    run.renew(1)
    if link == "attribute":
        run.params[1].grad.owner = run.optimizer
    else:
        run.params[1].grad = run.random().requires_grad_() * 2
    for _ in range(4):
        run.optimizer.step()
    assert run.lots == 1
