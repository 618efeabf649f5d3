"""Trains a tiny model and saves after every step; forks the processes of each job that it reads.

Run as a script: a job is a line of JSON on stdin, answered by a line with the process ids at once
and a line with the exit codes at the end. Forked, because torch is imported once for all jobs.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # torch's optimizers import it when they are first used: seconds
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _amp_state
from apex.amp.scaler import LossScaler

STEPS = 10
OVERFLOW_STEP = 4
SCALE_WINDOW = 3  # the loss scale grows within a run, too


def build_optimizer(kind, params):
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)
    if kind == "adam":
        return torch.optim.Adam(params, lr=1e-3, eps=1e-4)  # 1e-8 is 0 in float16
    from apex import optimizers

    if kind == "fused_sgd":
        return optimizers.FusedSGD(
            params, lr=0.05, momentum=0.9, weight_decay=0.01, materialize_master_grads=False
        )
    name = {"fused_adam": "FusedAdam", "fused_lamb": "FusedLAMB"}[kind]
    return getattr(optimizers, name)(params, lr=1e-3, eps=1e-4, weight_decay=0.01)


def save(path, state, job):
    """Write atomically, as docs/examples/imagenet/checkpoint.py does; or die on the way there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    dies_here = job.get("dies_in_save") == state["step"]
    with open(temporary, "wb") as file:
        torch.save(state, DyingFile(file, job["dies_at_byte"]) if dies_here else file)
        file.flush()
    if dies_here:  # there were fewer bytes: die between the two calls
        os.kill(os.getpid(), signal.SIGKILL)
    os.replace(temporary, path)


class DyingFile:
    """A file whose process is killed when so many bytes have been written."""

    def __init__(self, file, bytes_left):
        self._file, self._bytes_left = file, bytes_left

    def write(self, data):
        size = len(data)
        self._file.write(data[: self._bytes_left])
        self._bytes_left -= size
        if self._bytes_left < 0:
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return size

    def flush(self):
        self._file.flush()


def resume(path, model, optimizer):
    """Restore all three, and return the number of finished steps."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    return state["step"]


def train_step(model, optimizer, step, rank):
    torch.manual_seed(100 * step + rank)  # the random state is a function of the step
    optimizer.zero_grad()
    for is_last in (False, True):
        x, y = torch.randn(8, 6), torch.randint(3, (8,))
        loss = F.cross_entropy(model(x), y)
        if step == OVERFLOW_STEP and is_last and _amp_state.loss_scalers[0].dynamic:
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer, delay_unscale=not is_last) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()


def train(job, rank):
    path = Path(job["folder"]) / "checkpoint.pt"
    torch.manual_seed(0 if not path.exists() else time.time_ns())  # a resumed run starts anywhere
    network = nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)),
        nn.Linear(8, 3),
    )
    optimizer = build_optimizer(job["kind"], network.parameters())
    model, optimizer = amp.initialize(network, optimizer, opt_level=job["level"], verbosity=0)
    _amp_state.loss_scalers[0]._scale_seq_len = SCALE_WINDOW
    start = resume(path, model, optimizer)
    if job["ranks"] > 1:
        model = nn.parallel.DistributedDataParallel(model)
    for step in range(start, STEPS):
        train_step(model, optimizer, step, rank)
        if rank == 0:
            state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
            save(path, {**state, "amp": amp.state_dict(), "step": step + 1}, job)


def run_rank(job, rank):
    """The life of a forked process."""
    try:
        if job["ranks"] > 1:
            store = f"file://{job['folder']}/store{job['attempt']}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job["ranks"])
        train(job, rank)
    except BaseException:
        (Path(job["folder"]) / "error.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def serve():
    # Gloo prints to what processes know as stdout, in some releases; answers have one of their own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    grads = [torch.ones(1)]
    LossScaler("dynamic").unscale(grads, grads)  # loads the kernels, for all that are forked
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                run_rank(job, rank)
            pids.append(pid)
        print(json.dumps(pids), file=answers, flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), file=answers, flush=True)


if __name__ == "__main__":
    serve()
