"""What DistributedDataParallel does not hide of communication, at 100 Mbit/s to 10 Gbit/s.

Two processes live in two network namespaces that a bridge joins, and tc limits the rate of each.
Exposed is the time of a step minus that of one without communication, which a plain module gives.
Needs root and the commands ip and tc. Where they are missing it says so and ends.
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from apex.parallel import DistributedDataParallel
from apex_testkit.bench import record_samples
from apex_testkit.load import Load, LoadMeter

RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "10 Gbit/s": "10gbit"}
BRIDGE, SPACE, VETH = "apexbr", "apexns", "apexv"  # of interfaces and namespaces made here
WARM_UP, STEPS = 2, 9
BATCH = 256


def command(line):
    subprocess.run(line.split(), check=True, capture_output=True)


@contextlib.contextmanager
def network():
    """Two namespaces, whose interfaces eth0 have the addresses 10.78.0.1 and 10.78.0.2."""
    try:
        command(f"ip link add {BRIDGE} type bridge")
        command(f"ip link set {BRIDGE} up")
        for i in (0, 1):
            command(f"ip netns add {SPACE}{i}")
            command(f"ip link add {VETH}{i} type veth peer name eth0 netns {SPACE}{i}")
            command(f"ip link set {VETH}{i} master {BRIDGE} up")
            command(f"ip -n {SPACE}{i} addr add 10.78.0.{i + 1}/24 dev eth0")
            command(f"ip -n {SPACE}{i} link set eth0 up")
            command(f"ip -n {SPACE}{i} link set lo up")
        yield
    finally:
        for line in (f"ip netns del {SPACE}0", f"ip netns del {SPACE}1", f"ip link del {BRIDGE}"):
            with contextlib.suppress(subprocess.CalledProcessError):
                command(line)


def limit(rate):
    for i in (0, 1):
        command(
            f"ip netns exec {SPACE}{i} tc qdisc replace dev eth0 root tbf rate {rate} burst 1mb "
            "latency 100ms"
        )


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
        "alone": build(),
    }

    def step(model):
        model.zero_grad()
        model(x).sum().backward()

    return {name: lambda model=model: step(model) for name, model in models.items()}


def work(rank, case):
    """One rank's part; rank 0 reports."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method="tcp://10.78.0.1:29578",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    steps = steps_of_all()
    samples = {name: [] for name in steps}
    names, meter, began, own = list(steps), LoadMeter(), time.perf_counter(), time.process_time()
    for run in range(WARM_UP + STEPS):
        shift = run % len(names)
        for name in names[shift:] + names[:shift]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            if run >= WARM_UP:
                samples[name].append((time.perf_counter() - start) * 1e6)
    elapsed = time.perf_counter() - began
    peer = torch.tensor((time.process_time() - own) / elapsed)  # cores of rank 1
    dist.broadcast(peer, 1)
    if rank == 0:
        load = meter.read()
        if load.others is not None:
            load = Load(max(0.0, load.others - peer.item()), load.steal)
        alone = statistics.median(samples.pop("alone"))
        exposed = {name: [max(t - alone, 1.0) for t in times] for name, times in samples.items()}
        title = f"{case}, beyond {alone / 1e3:.0f} ms of compute"
        record_samples("ddp_network", title, exposed, load)
    dist.destroy_process_group()


def main():
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        print(f"ddp_network: needs root and the commands ip and tc (missing: {missing}); not run")
        return
    with network():
        for case, rate in RATES.items():
            limit(rate)
            ranks = []
            for rank in (0, 1):
                program = [sys.executable, __file__, str(rank), case]
                environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0"}
                line = ["ip", "netns", "exec", f"{SPACE}{rank}", *program]
                ranks.append(subprocess.Popen(line, env=environment))
            try:
                codes = [process.wait(timeout=600) for process in ranks]
            finally:
                for process in ranks:
                    process.kill()
            if any(codes):
                sys.exit(f"ddp_network: a rank failed at {case}: {codes}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(int(sys.argv[1]), sys.argv[2])
    else:
        main()
