"""What communication a training step does not hide, between two hosts of limited rate.

Exposed is the time of a step minus that of one without communication.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from apex_testkit.bench import record_samples
from apex_testkit.load import Load, LoadMeter
from ci.hosts.network import Network, what_is_missing

ALONE = "alone"  # the contestant without communication
PORT = 29579
ROUNDS = 6  # the first one warms up
STEPS = 2  # that are timed, of each contestant in a round


def run_program(op: str, program: str, rates: dict[str, str]) -> None:
    """Run ``program`` on two hosts at each rate, with the arguments rank, rate and address.

    The program calls :func:`measure`. Where there can be no such hosts this says why and returns.

    Args:
        op: what is measured, for messages.
        rates: as a reader and as tc write them: ``{"1 Gbit/s": "1gbit"}``.
    """
    missing = what_is_missing() or (not shutil.which("tc") and "the command `tc` was not found")
    if missing:
        print(f"{op}: no limited rates: {missing}")
        return
    with Network(2) as network:
        for case, rate in rates.items():
            ranks = []
            for host in network.hosts:
                network.limit(host, rate)
                command = [sys.executable, program, str(host - 1), case, network.address(1)]
                line = ["ip", "netns", "exec", network.name(host), *command]
                environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0"}
                ranks.append(subprocess.Popen(line, env=environment))
            try:
                codes = [process.wait(timeout=600) for process in ranks]
            finally:
                for process in ranks:
                    process.kill()
            if any(codes):
                sys.exit(f"{op}: a rank failed at {case}: {codes}")


def measure(
    op: str, rank: int, case: str, address: str, make_steps: Callable[[], dict[str, Callable]]
) -> None:
    """Time the steps on this host and the other one; rank 0 records what each of them exposes.

    Args:
        case: of the record; the time of a step alone is added to it.
        address: of rank 0.
        make_steps: steps by contestant, the same on both ranks, and :data:`ALONE` among them.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    where, limit = f"tcp://{address}:{PORT}", timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=limit)
    steps = make_steps()
    samples = {name: [] for name in steps}
    names, meter, began, own = list(steps), LoadMeter(), time.perf_counter(), time.process_time()
    for turn in range(ROUNDS):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            steps[name]()  # not timed: it finds nothing under way, which a step may leave behind
            dist.barrier()
            for _ in range(STEPS):
                start = time.perf_counter()
                steps[name]()
                if turn:
                    samples[name].append((time.perf_counter() - start) * 1e6)
    elapsed = time.perf_counter() - began
    peer = torch.tensor((time.process_time() - own) / elapsed)  # cores of rank 1
    dist.broadcast(peer, 1)
    if rank == 0:
        load = meter.read()
        if load.others is not None:
            load = Load(max(0.0, load.others - peer.item()), load.steal)
        alone = statistics.median(samples.pop(ALONE))
        exposed = {name: [max(t - alone, 1.0) for t in times] for name, times in samples.items()}
        record_samples(op, f"{case}, exposed beyond {alone / 1e3:.0f} ms", exposed, load)
    dist.destroy_process_group()
