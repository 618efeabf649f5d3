"""DistributedDataParallel's and Reducer's refusals, and options that only warn."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.parallel import DistributedDataParallel, ReduceOp, Reducer


def test_reduce_op_is_torchs():
    assert ReduceOp is dist.ReduceOp


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, Reducer])
def test_needs_a_process_group(wrapper):
    with pytest.raises(RuntimeError, match="init_process_group"):
        wrapper(nn.Linear(2, 2))


def refused(match, error=ValueError, module=None, **options):
    with pytest.raises(error, match=match):
        DistributedDataParallel(nn.Linear(2, 2) if module is None else module, **options)


def check_refusals(rank, world):
    refused("message_size must be > 0 elements, got 0", message_size=0)
    refused("num_allreduce_streams must be an integer >= 1, got 0", num_allreduce_streams=0)
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        refused("gradient_predivide_factor must be finite", gradient_predivide_factor=factor)
    refused("shared_param is no longer supported", shared_param=True)
    refused("allreduce_trigger_params has no effect with delay_allreduce", delay_allreduce=True,
            allreduce_trigger_params=[])  # fmt: skip
    refused("num_allreduce_streams=2 has no effect", delay_allreduce=True, num_allreduce_streams=2)
    stranger = nn.Parameter(torch.zeros(1))
    refused(r"allreduce_trigger_params\[0\] is not", allreduce_trigger_params=[stranger])
    refused("module must be a torch.nn.Module, got list", TypeError, module=[1])
    refused("weight of module has no values yet", module=nn.LazyLinear(2))
    refused("weight of module has no values yet", module=nn.Linear(2, 2, device="meta"))


def check_communicators(rank, world):
    groups = [dist.new_group() for _ in range(2)]
    streams = [None, None]
    refused("needs num_allreduce_streams > 1", allreduce_communicators=(groups, streams))
    two = {"num_allreduce_streams": 2}
    refused("lists of [^.]*2, 1", allreduce_communicators=(groups, [None]), **two)
    refused(r"lists of [^.]*2\]", allreduce_communicators=(groups,), **two)
    refused("Give None on the CPU", allreduce_communicators=(groups, [object(), None]), **two)
    alone = [dist.new_group([r]) for r in range(world)]
    refused(r"\[0\]\[1\] spans 1 ranks; expected all 2",
            allreduce_communicators=([groups[0], alone[rank]], streams), **two)  # fmt: skip


def check_split_factor(rank, world):
    with pytest.warns(UserWarning, match="gradient_average_split_factor has no effect"):
        DistributedDataParallel(nn.Linear(2, 2), gradient_average_split_factor=2.0)
    with pytest.raises(TypeError, match="got int"):
        Reducer([torch.zeros(1), 3])


def check_reducer_refusals(rank, world):
    with pytest.raises(RuntimeError, match=r"^Reducer: the parameters of ranks \[1\] differ"):
        Reducer(nn.Linear(2, 1 + rank))
    with pytest.raises(ValueError, match=r"^Reducer: parameter weight of .* has no values"):
        Reducer(nn.LazyLinear(2))


def test_refusals(two_ranks):
    two_ranks(check_reducer_refusals)
    two_ranks(check_refusals)
    two_ranks(check_communicators)
    two_ranks(check_split_factor)


def check_nothing_to_train(rank, world):
    ddp = DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    x = torch.ones(1, 2, requires_grad=True)
    ddp(x).sum().backward()
    assert x.grad is not None
    ddp = DistributedDataParallel(nn.Identity())
    ddp(x * 1).sum().backward()


def test_frozen_and_empty_modules(two_ranks):
    two_ranks(check_nothing_to_train)


def check_attributes(rank, world):
    """What scripts read and set on the wrapper itself."""
    ddp = DistributedDataParallel(nn.Linear(2, 1), message_size=2)
    assert type(ddp).__bases__ == (nn.Module,)
    assert ddp.callback_queued is False
    assert ddp.num_buckets == ddp.next_bucket == 0
    assert ddp.buckets == ddp.bucket_sizes == ddp.active_i_buckets == []
    for size, count in ((1, 2), (100, 1)):
        ddp.message_size, ddp.needs_refresh = size, True
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()
        assert ddp.num_buckets == len(ddp.buckets) == count
    assert ddp.ready_buckets_not_reduced == set()
    assert ddp.next_bucket == 1
    assert ddp.world_size == world
    assert len(ddp.active_params) == 2
    assert ddp.bucket_streams == ddp.bucket_events == [None]
    assert len(ddp.bucket_pgs) == 1
    with pytest.raises(AttributeError, match="num_buckets can only be read"):
        ddp.num_buckets = 3
    mine = {name for name in ddp.__getstate__() if name not in vars(nn.Module())}
    assert mine == {  # as plain names, which older pickles hold
        "_disable_allreduce",
        "allreduce_always_fp32",
        "allreduce_trigger_params",
        "delay_allreduce",
        "gradient_average",
        "gradient_predivide_factor",
        "message_size",
        "num_allreduce_streams",
        "prof",
        "retain_allreduce_buffers",
    }


def test_attributes(two_ranks):
    two_ranks(check_attributes)
