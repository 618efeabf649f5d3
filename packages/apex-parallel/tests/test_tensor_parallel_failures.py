"""A tensor-parallel rank that dies: every collective of the others says so, and what to do."""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.transformer import parallel_state
from apex.transformer.amp import GradScaler
from apex.transformer.failures import explained
from apex.transformer.pipeline_parallel import utils
from apex.transformer.tensor_parallel import broadcast_data, mappings
from apex.transformer.utils import gather_split_1d_tensor
from apex_testkit.model_parallel import model_parallel


def unscale():
    param = nn.Parameter(torch.ones(3))
    scaler, optimizer = GradScaler(device="cpu"), torch.optim.SGD([param])
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)


def in_backward():
    x = torch.ones(4, 6, requires_grad=True)
    mappings.copy_to_tensor_model_parallel_region(x).sum().backward()


LOST = "No word from rank 1 for 2 s, so look at what these printed"
ONE = torch.ones(4, 6)
CALLS = {  # by what is to be read
    "the all-reduce into a tensor of shape [4, 6]": lambda: (
        mappings.reduce_from_tensor_model_parallel_region(ONE)
    ),
    "the all-reduce into a tensor of shape [4, 6] ": in_backward,
    "the all-gather into a tensor of shape [8, 6]": lambda: (
        mappings.gather_from_sequence_parallel_region(ONE)
    ),
    "the reduce-scatter into a tensor of shape [4, 6]": lambda: (
        mappings.reduce_scatter_to_sequence_parallel_region(ONE)
    ),
    "broadcast_data": lambda: broadcast_data(["x"], {"x": ONE}, torch.float32),
    "gather_split_1d_tensor": lambda: gather_split_1d_tensor(ONE),
    "GradScaler, which asks whether a gradient is infinite,": unscale,
    "calc_params_l2_norm": lambda: utils.calc_params_l2_norm(nn.Linear(2, 2), bf16=False),
}


def check_lost(rank, world):
    with model_parallel(2, 1):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for what, call in CALLS.items():
            text = rf"rank 0\)?: {re.escape(what.strip())} failed\. {LOST}.*checkpoint"
            with pytest.raises(RuntimeError, match=text):
                call()
        text = rf"^rank 0: the count failed\. {LOST}"
        with pytest.raises(RuntimeError, match=text), explained("the count"):
            dist.barrier()


def test_every_collective_names_the_other_rank(doomed_ranks):
    doomed_ranks(check_lost, expect_death=[1])


def check_average(rank, world):
    with model_parallel(1, 1):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        # In a ring, the rank opposite learns of it when its neighbours end.
        text = rf"^rank {rank}: average_losses_\w+ failed\. No word from rank (\d, )?2 for 2 s"
        with pytest.raises(RuntimeError, match=text):
            utils.average_losses_across_data_parallel_group([torch.ones(1)])


def test_several_others(four_doomed_ranks):
    four_doomed_ranks(check_average, expect_death=[2])


def test_memory_that_runs_out_is_no_lost_rank():
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(torch.OutOfMemoryError, match=r"^planted$"), explained("the sum"):
        raise torch.OutOfMemoryError("planted")
