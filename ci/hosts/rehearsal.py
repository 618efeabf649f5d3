"""Train on three hosts of which some die and rejoin; compare with a run that nobody ended.

`nox -s hosts` runs this. The hosts are network namespaces (network.py), each with a torchrun and a
folder of its own for checkpoints; the script is docs/examples/several_hosts/train.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ci.hosts.network import HUB, HUB_ADDRESS, Network

HERE = Path(__file__).resolve().parent
TRAIN = HERE.parents[1] / "docs" / "examples" / "several_hosts" / "train.py"
PORT = 29400
STEPS, EVERY = 600, 10
SILENCE_S = 12  # until ranks give up on one that sends nothing
SLOW_S = 0.5  # a step, while a host is away, which takes a minute to start on a busy machine
LIMIT_S = 240  # of each thing that is waited for
KEEP_STORE = f"""
import time, torch.distributed as dist
store = dist.TCPStore("{HUB_ADDRESS}", {PORT}, is_master=True, wait_for_workers=False)
time.sleep(3600)
"""
RENDEZVOUS = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
PROGRESS = re.compile(r"step (\d+)/\d+ ranks (\d+) loss")
BEGINS = re.compile(r"begins at step (\d+), ranks")


@dataclass(frozen=True)
class Progress:
    """What rank 0 last wrote, and on which host it is."""

    step: int
    ranks: int
    host: int


class Job:
    """A training on the hosts of a network; ``nodes`` is torchrun's --nnodes, such as 2:3."""

    def __init__(self, network: Network, folder: Path, nodes: str) -> None:
        self.network, self.folder, self.nodes = network, folder, nodes
        folder.mkdir()
        self.pace = folder / "pace"
        self.take_time(SLOW_S)
        self.agents: dict[int, subprocess.Popen] = {}
        self.first_starts: int | None = None  # from step 0, before any host was lost
        self.began = time.monotonic()
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        keeper = [sys.executable, "-c", KEEP_STORE]
        network.start(HUB, keeper, self.environment, str(folder / "store.log"))
        for host in network.hosts:
            self.join(host)

    def say(self, text: str) -> None:
        """Print a line with the seconds since the job began."""
        print(f"{self.nodes:>4} {time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def take_time(self, step_s: float) -> None:
        """Let a step take so many seconds longer from now on."""
        partial = self.folder / "next_pace"
        partial.write_text(str(step_s))
        partial.replace(self.pace)

    def join(self, host: int) -> None:
        """Start torchrun on a host, with an empty folder for its checkpoints."""
        self.network.plug(host)
        shutil.rmtree(self.folder / f"host{host}", ignore_errors=True)
        launcher = f"""-m torch.distributed.run --nnodes={self.nodes} --nproc-per-node=1
            --rdzv-backend=c10d --rdzv-endpoint={HUB_ADDRESS}:{PORT} --rdzv-id={self.folder.name}
            --rdzv-conf {RENDEZVOUS} --local-addr={self.network.address(host)}
            --max-restarts=20 --monitor-interval=0.2 {HERE / "paced.py"} {self.pace}
            {TRAIN} --steps={STEPS} --every={EVERY} --timeout={SILENCE_S}
            --checkpoints={self.folder / f"host{host}"}"""
        command = [sys.executable, *launcher.split()]
        log = str(self.folder / f"host{host}.log")
        self.agents[host] = self.network.start(host, command, self.environment, log)

    def leave(self, host: int, *, silently: bool) -> None:
        """End every process of a host; silently: its cable is pulled first, as by a power cut."""
        if silently:
            self.network.unplug(host)
        self.network.kill(host)
        self.agents.pop(host).wait(10)
        if self.first_starts is None:
            self.first_starts = self.starts().count(0)

    def starts(self) -> list[int]:
        """Return the steps at which processes have begun, or gone on from a checkpoint."""
        logs = (self.folder / f"host{host}.log" for host in self.network.hosts)
        return [int(step) for log in logs for step in BEGINS.findall(log.read_text())]

    def progress(self) -> Progress:
        """Return where the training is, after the newest line that any rank 0 wrote."""
        newest = (0.0, Progress(0, 0, 0))
        for host in self.network.hosts:
            log = self.folder / f"host{host}.log"
            if found := PROGRESS.findall(log.read_text()):
                step, ranks = map(int, found[-1])
                newest = max(newest, (log.stat().st_mtime, Progress(step, ranks, host)), key=first)
        return newest[1]

    def wait(self, what: str, is_so: Callable[[Progress], bool]) -> Progress:
        """Wait until the progress is as wanted; fail with the logs if it takes too long."""
        since = time.monotonic()
        while not is_so(progress := self.progress()):
            ended = [h for h, agent in self.agents.items() if agent.poll() is not None]
            if ended or time.monotonic() - since > LIMIT_S:
                trouble = f"host {ended} ended" if ended else f"not within {LIMIT_S} s"
                raise RuntimeError(f"{what}: {trouble}; last: {progress}\n{self.logs()}")
            time.sleep(0.05)
        took = time.monotonic() - since
        self.say(f"{what}: step {progress.step} on {progress.ranks} ranks ({took:.1f} s)")
        return progress

    def finish(self) -> list[dict]:
        """Wait for every torchrun to succeed; return the history, which all hosts agree on."""
        self.take_time(0)
        for host, agent in self.agents.items():
            if agent.wait(LIMIT_S):
                raise RuntimeError(f"host {host} ended with {agent.returncode}\n{self.logs()}")
        names = "import json, torch; print(json.dumps([torch.load(p)['history'] for p in {}]))"
        paths = [str(self.folder / f"host{h}" / f"step-{STEPS:08d}.pt") for h in self.agents]
        read = [sys.executable, "-c", names.format(paths)]
        histories = json.loads(subprocess.check_output(read, text=True, timeout=LIMIT_S))
        if any(history != histories[0] for history in histories):
            raise RuntimeError(f"hosts end with different histories: {histories}")
        resumed = sorted(self.starts())[self.first_starts :]
        if not resumed or resumed[0] == 0:
            raise RuntimeError(f"went on from steps {resumed} after a host was lost\n{self.logs()}")
        self.say(f"done on hosts {sorted(self.agents)}; went on from the steps {resumed}")
        self.network.kill(HUB)
        return histories[0]

    def logs(self) -> str:
        """Return the end of every log."""
        texts = {log.name: log.read_text() for log in sorted(self.folder.glob("*.log"))}
        return "\n".join(f"--- {name}\n{text[-3000:]}" for name, text in texts.items())


def first(pair: tuple) -> float:
    return pair[0]


def beyond(step: int, ranks: int) -> Callable[[Progress], bool]:
    """Whether so many ranks are at a later step."""
    return lambda progress: progress.step > step and progress.ranks == ranks


def a_host_returns(network: Network, folder: Path) -> list[dict]:
    """Three hosts or none: the job stands still while one is away."""
    job = Job(network, folder, "3")
    at = job.wait("three hosts train", beyond(20, 3))
    job.leave(2, silently=False)
    job.say("host 2 was killed")
    job.join(2)
    at = job.wait("host 2 has rejoined", beyond(at.step + EVERY, 3))
    return job.finish()


def hosts_come_and_go(network: Network, folder: Path) -> list[dict]:
    """Two hosts are enough: the job goes on without the third, and takes it in again."""
    job = Job(network, folder, "2:3")
    at = job.wait("three hosts train", beyond(20, 3))
    away = next(h for h in network.hosts if h != at.host)
    job.leave(away, silently=True)
    job.say(f"host {away} lost its power")
    at = job.wait("two hosts go on", beyond(at.step, 2))
    job.join(away)
    at = job.wait(f"host {away} has rejoined, its disk empty", beyond(at.step, 3))
    job.leave(at.host, silently=False)
    job.say(f"host {at.host}, of rank 0, was killed")
    job.wait("two hosts go on", beyond(at.step, 2))
    return job.finish()


def plan_of(history: list[dict]) -> list[str]:
    """``RANKS:END`` of each stretch of a history with one number of ranks."""
    stretches = groupby(history, key=lambda entry: entry["ranks"])
    return [f"{ranks}:{list(entries)[-1]['step']}" for ranks, entries in stretches]


def uninterrupted(plan: list[str], folder: Path) -> list[dict]:
    """The history of replay.py."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command = [sys.executable, *launcher, str(HERE / "replay.py"), str(EVERY), str(folder), *plan]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    options = {"capture_output": True, "text": True, "timeout": 2 * LIMIT_S}
    done = subprocess.run(command, env=environment, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, history: list[dict], expected: list[dict]) -> None:
    """Every checkpoint of a history has the digest of the uninterrupted run."""
    for entry, other in zip(history, expected, strict=True):
        if entry != other:
            raise RuntimeError(f"{name}: expected {other}, got {entry}")
    print(f"{name}: all {len(history)} checkpoints equal the uninterrupted run's, bit for bit")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as root, Network(3) as network:
        folder = Path(root)
        fixed = a_host_returns(network, folder / "fixed")
        elastic = hosts_come_and_go(network, folder / "elastic")
        steady = uninterrupted([f"3:{STEPS}"], folder / "steady")
        compare("three hosts, one killed and rejoined", fixed, steady)
        plan = plan_of(elastic)
        expected = uninterrupted(plan, folder / "replay")
        compare(f"hosts that come and go, ranks:steps {' '.join(plan)}", elastic, expected)
        # Two ranks add in another order than three: a digest sees that, or it would see nothing.
        if elastic[-1]["digest"] == steady[-1]["digest"]:
            raise RuntimeError("two and three ranks gave the same bits; digests see too little")
    print(f"took {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
