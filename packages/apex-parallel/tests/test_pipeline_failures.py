"""A stage that dies, hangs, raises or has other shapes is an error on every rank, in time.

``APEX_PIPELINE_FAULTS`` sets the number of random faults; 200 of them take some minutes.
"""

import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.transformer import parallel_state
from apex.transformer.pipeline_parallel import get_forward_backward_func, utils
from apex_testkit.model_parallel import model_parallel
from apex_testkit.ranks import Ranks

TIMEOUT_S = 2  # of the groups if a stage sleeps; otherwise it is 60, and not needed
SOON_S = 40  # an error comes before this, on a busy machine too
FAULTS = "killed", "asleep", "raises", "another shape", "other arguments"
MICROBATCHES = 8
SHAPE = 3, 2, 5


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.input = None

    def set_input_tensor(self, tensors):
        (self.input,) = tensors

    def forward(self):
        return self.layer(torch.ones(SHAPE) if self.input is None else self.input)


def happens(fault):
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "asleep":
        time.sleep(2 * TIMEOUT_S)
    if fault == "raises":
        raise ArithmeticError("planted")


def check_fault(rank, world, fault, victim, chunks, at, in_backward, **options):
    """Three steps; in the second one ``victim`` goes wrong in forward or backward number ``at``."""
    done = {"step": 0, "forward": 0, "backward": 0}

    def is_now(what):
        done[what] += 1
        return (done["step"], rank, done[what]) == (1, victim, at)

    def counts(what):
        if is_now(what) and (what == "backward") == in_backward:
            happens(fault)

    def step(batch, model):
        counts("forward")
        output = model()
        output.register_hook(lambda grad: counts("backward"))
        if fault == "another shape" and (done["step"], rank, done["forward"]) == (1, victim, at):
            output = output[:-1]
        return output, lambda output: (output.sum(), None)

    if fault == "asleep":  # groups get the world's timeout
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)
    with model_parallel(1, world):
        utils.setup_microbatch_calculator(1, None, MICROBATCHES, 1, 1)
        if chunks > 1:
            parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
        run = get_forward_backward_func(chunks if chunks > 1 else None, world)
        models = [Part() for _ in range(chunks)]
        for number in range(3):
            done.update(step=number, forward=0, backward=0)
            is_other = (fault, victim, number) == ("other arguments", rank, 1)
            shape = (4, *SHAPE[1:]) if is_other else SHAPE
            begin = time.monotonic()
            try:
                run(step, None, models, forward_only=False, tensor_shape=shape, **options)
            finally:
                assert time.monotonic() - begin < SOON_S, "it took too long"


def random_case(number):
    chosen = random.Random(number)
    fault, chunks = FAULTS[number % len(FAULTS)], chosen.choice([1, 2])
    victim = chosen.randrange(4)
    if fault == "another shape" and victim == 3:
        victim = 2  # the last stage hands nothing on
    return {
        "fault": fault,
        "chunks": chunks,
        "victim": victim,
        "at": chosen.randrange(1, MICROBATCHES * (1 if fault == "another shape" else chunks) + 1),
        "in_backward": chosen.random() < 0.5,
        "async_comm": chosen.random() < 0.5,
        "deallocate_pipeline_outputs": chosen.random() < 0.5,
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("APEX_PIPELINE_FAULTS", "10"))))
def test_every_rank_raises(number, tmp_path):
    case = random_case(number)
    ranks = Ranks(4, tmp_path)
    reports = ranks.failures(check_fault, timeout_s=150, **case)
    ranks.stop()
    assert sorted(reports) == [0, 1, 2, 3], (case, reports)
    for rank, text in reports.items():
        what = f"{case}, rank {rank}: {text}"
        assert "it took too long" not in text, what
        if rank != case["victim"] or case["fault"] == "asleep":
            assert "RuntimeError: pipeline stage " in text, what
        elif case["fault"] == "killed":
            assert text == "died with exit code -9", what
        elif case["fault"] == "raises":
            way = "backward" if case["in_backward"] else "forward"
            assert "ArithmeticError: planted" in text, what
            assert f"in the {way} of micro-batch " in text or not hasattr(Exception, "add_note")
        elif case["fault"] == "another shape":
            assert "ValueError: tensor_shape: the output of micro-batch " in text, what
        else:
            assert "expects shapes" in text, what
