"""What DistributedDataParallel does not hide of communication, at 100 Mbit/s to 10 Gbit/s.

Two processes live in two network namespaces, of which tc limits the rate. Exposed is the time of a
step minus that of a plain module. That needs root and the commands ip and tc; where they are
missing it says so and ends.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from apex.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[3]))
from ci.hosts import exposed

RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "10 Gbit/s": "10gbit"}
BATCH = 256


def steps_of_all():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])

    x = torch.randn(BATCH, 512)
    models = {
        "apex": DistributedDataParallel(build()),
        "apex_small_buckets": DistributedDataParallel(build(), message_size=500_000),
        "apex_delayed": DistributedDataParallel(build(), delay_allreduce=True),
        "torch": TorchDDP(build()),
        "torch_views": TorchDDP(build(), gradient_as_bucket_view=True),
        exposed.ALONE: build(),
    }

    def step(model):
        model.zero_grad()
        model(x).sum().backward()

    return {name: partial(step, model) for name, model in models.items()}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank, case, address = sys.argv[1:]
        exposed.measure("ddp_network", int(rank), case, address, steps_of_all)
    else:
        exposed.run_program("ddp_network", __file__, RATES)
