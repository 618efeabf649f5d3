"""A training step's forward and backward on 2 gloo processes: DistributedDataParallel and torch's.

The peer reduces in 25 MiB buckets, ours in message_size=6,553,600 float32 elements, the same;
"alone" reduces nothing and is what no wrapper can beat. Rank 1 does what rank 0 tells it through a
pipe, which costs some 50 us a step for every contestant.
"""

import multiprocessing
import tempfile
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from apex.parallel import DistributedDataParallel
from apex_testkit.bench import compare

MODELS = {
    "8 x Linear(1024, 1024), 8.4 M": ([1024] * 9, 64),
    "200 x Linear(64, 64), 0.8 M": ([64] * 201, 64),
}
BUCKET_BYTES = 25 << 20


def stepper(model, x):
    def run():
        model.zero_grad()
        model(x).sum().backward()

    return run


def contestants(widths, rows):
    """The same on every rank: constructors communicate."""

    def build():
        torch.manual_seed(0)
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        return nn.Sequential(*layers)

    x = torch.randn(rows, widths[0])
    ours = DistributedDataParallel(build(), message_size=BUCKET_BYTES // 4)
    return {
        "apex": stepper(ours, x),
        "apex_delayed": stepper(DistributedDataParallel(build(), delay_allreduce=True), x),
        "torch_ddp": stepper(nn.parallel.DistributedDataParallel(build()), x),
        "alone": stepper(build(), x),
    }


def join(rank, init_file):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{init_file}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )


def follow(connection, init_file):
    join(1, init_file)
    for widths, rows in MODELS.values():
        steps = contestants(widths, rows)
        while (name := connection.recv()) is not None:
            steps[name]()
    dist.destroy_process_group()


def lead(connection, init_file):
    join(0, init_file)
    for case, (widths, rows) in MODELS.items():
        steps = contestants(widths, rows)

        def together(name, steps=steps):
            def run():
                connection.send(name)
                steps[name]()

            return run

        compare("ddp_forward_backward", case, **{name: together(name) for name in steps})
        connection.send(None)
    dist.destroy_process_group()


def main():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        init_file = str(Path(folder) / "init")
        follower = context.Process(target=follow, args=(there, init_file))
        follower.start()
        there.close()  # so that a follower that dies ends the leader's send, too
        lead(here, init_file)
        follower.join()


if __name__ == "__main__":
    main()
