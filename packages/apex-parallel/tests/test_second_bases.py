"""Classes of a user's that derive from ours and from a second base with arguments of its own."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from apex.parallel import DistributedDataParallel, Reducer, SyncBatchNorm
from apex.parallel.LARC import LARC
from apex.transformer._data import MegatronPretrainingSampler
from apex.transformer.amp import GradScaler
from apex.transformer.microbatches import ConstantNumMicroBatches
from apex.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    model_parallel_cuda_manual_seed,
)


class Named:
    """A base whose constructor takes an argument, and calls no other."""

    def __init__(self, name):
        self.name = name


class NamedBefore(Named, DistributedDataParallel):
    def __init__(self, name, module, **options):
        DistributedDataParallel.__init__(self, module, **options)
        Named.__init__(self, name)


class NamedBehind(DistributedDataParallel, Named):
    def __init__(self, name, module, **options):
        Named.__init__(self, name)
        DistributedDataParallel.__init__(self, module, **options)

    @property
    def device(self):
        return self.join_device


def check_ddp(rank, world):
    for order in (NamedBefore, NamedBehind):
        ddp = order("net", nn.Linear(1, 1, bias=False))
        assert ddp.name == "net"
        assert isinstance(ddp, Joinable)
        with Join([ddp]):
            for _ in range(1 + rank):
                ddp.zero_grad()
                ddp(torch.ones(1, 1)).sum().backward()
        # Rank 1 alone had a second input, of gradient 1.
        assert [p.grad.item() for p in ddp.parameters()] == [1.0 / world if rank else 1.0]
        ddp(torch.full((1, 1), float(rank))).sum().backward()  # no longer joining
        clone = copy.deepcopy(ddp)
        assert clone.name == "net"
        with clone.join():
            clone(torch.ones(1, 1)).sum().backward()


def test_of_ddp(two_ranks):
    two_ranks(check_ddp)


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


OTHERS = {
    LARC: lambda: (sgd(),),
    Reducer: lambda: (nn.Linear(2, 2),),
    SyncBatchNorm: lambda: (4,),
    GradScaler: lambda: (),
    ColumnParallelLinear: lambda: (4, 4),
    RowParallelLinear: lambda: (4, 4),
    VocabParallelEmbedding: lambda: (4, 4),
    MegatronPretrainingSampler: lambda: (8, 0, 1, 0, 1),
    ConstantNumMicroBatches: lambda: (8, 1, 1),
}


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("is_behind", [False, True], ids=["before", "behind"])
@pytest.mark.usefixtures("alone")
def test_of_others(cls, is_behind):
    model_parallel_cuda_manual_seed(0)

    def build(self, *given):
        cls.__init__(self, *given)
        Named.__init__(self, "mine")

    bases = (cls, Named) if is_behind else (Named, cls)
    assert type("Mine", bases, {"__init__": build})(*OTHERS[cls]()).name == "mine"
