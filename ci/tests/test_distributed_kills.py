"""SIGKILL at random moments of training and saving, and between any two files of a checkpoint.

Whatever is killed, the next run finds a whole checkpoint, and has the bits of one that was never
interrupted. How the programs save and load is taken from the documentation. By default there are
about 30 kills. A long run by hand: ``APEX_KILLS=200 pytest -s ci/tests/test_distributed_kills.py``
has 200 at random moments for 2 and for 4 ranks each, and one before every change of a file; it
prints what was hit. ``APEX_SEED`` gives other moments.
"""

import ast
import hashlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB

PAGES = Path(__file__).resolve().parents[2] / "docs" / "contrib"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
KINDS = ("one file", "folder", "LAMB")
KILLS = -(-int(os.environ.get("APEX_KILLS", "3")) // len(KINDS))  # of each kind
# A folder has 84 changes of files, of which only some are in the run by default.
STRIDES = {"folder": 1 if "APEX_KILLS" in os.environ else 6}
SEED = int(os.environ.get("APEX_SEED", "0"))
STEPS, EVERY = 24, 2  # of a whole run; between checkpoints
TIMEOUT_S = 60
TRAINING, SAVING, DONE = 1, 2, 3
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch.distributed.checkpoint", "torch._dynamo", "pytest"]
PRELOADED += [DistributedFusedAdam.__module__, DistributedFusedLAMB.__module__]
FORKS.set_forkserver_preload(PRELOADED)


def programs():
    """By kind, the functions of the documentation that save and load."""
    found = []
    for page in ("distributed_fused_adam.md", "distributed_fused_lamb.md"):
        for block in BLOCK.findall((PAGES / page).read_text()):
            if "def save_checkpoint" in block:
                tree = ast.parse(block)
                kept = (ast.Import, ast.ImportFrom, ast.FunctionDef)
                tree.body = [node for node in tree.body if isinstance(node, kept)]
                found.append({})
                exec(compile(tree, page, "exec"), found[-1])
    return dict(zip(KINDS, found, strict=True))


def make(kind):
    """A model, and its optimizer with several buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 3))
    if kind == "LAMB":
        return model, DistributedFusedLAMB(model.parameters(), lr=1e-2, weight_decay=0.1)
    options = {"lr": 1e-2, "weight_decay": 0.1, "bucket_cap_mb": 0.002}
    optimizer = DistributedFusedAdam(model.parameters(), **options)
    if kind == "folder":
        optimizer.init_params()
    return model, optimizer


def train(rank, world, kind, folder, phases, kill_at):
    """What a rank runs: continue from the newest checkpoint, and save every other step.

    Args:
        phases: shared memory, in which each rank notes what it does.
        kill_at: stop after the first save, in which this event kills the rank; 0: none does. None:
            go on.
    """
    with open(folder / f"log-{rank}", "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    address, limit = f"file://{folder / 'init'}", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=limit)
    program, (model, optimizer) = programs()[kind], make(kind)
    checkpoints = folder / "checkpoints"
    step = program["load_newest"](checkpoints, model, optimizer)
    note(folder, rank, step, model)
    if kill_at is not None:
        arm(checkpoints, kill_at)
    while step < STEPS:
        phases[rank] = TRAINING
        torch.manual_seed(100 * step + rank)
        model(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note(folder, rank, step, model)
        if step % EVERY == 0:
            phases[rank] = SAVING
            program["save_checkpoint"](checkpoints, step, model, optimizer)
            if kill_at is not None:
                break
    phases[rank] = DONE
    dist.destroy_process_group()


def guarded(*arguments):
    """Leave at an error without waiting for threads of torch, as a launcher would have it."""
    try:
        train(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def note(folder, rank, step, model):
    """Append a line with a digest of all parameters."""
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
    with open(folder / f"lines-{rank}", "a") as file:
        file.write(f"{step} {digest}\n")


def arm(checkpoints, kill_at):
    """Have this process kill itself before the ``kill_at``-th change of files."""
    events = 0

    def change():
        nonlocal events
        events += 1
        if events == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(name, arguments):
        changes = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
        writes = name == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if (name in changes or writes) and str(arguments[0]).startswith(str(checkpoints)):
            change()

    def save(*arguments, native=torch.save, **options):  # opens files in C++, unseen by hooks
        change()
        native(*arguments, **options)
        change()

    sys.addaudithook(hook)
    torch.save = save


class Runs:
    """Runs of one program in one folder, each of which continues what the last one left."""

    def __init__(self, kind, world, folder):
        self.kind, self.world, self.folder = kind, world, folder
        self.forget()

    def forget(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "checkpoints").mkdir(parents=True)

    def newest(self):
        found = sorted((self.folder / "checkpoints").glob("step-*"))
        return int(found[-1].name.removeprefix("step-")) if found else 0

    def run(self, moment_s=None, victims=(), kill_at=None):
        """Exit codes, phases at the kill, and seconds from the first step to the end.

        Args:
            moment_s, victims: kill these ranks so long after all have begun to train.
            kill_at: end the run with the first save, where these ranks kill themselves at an event.
        """
        (self.folder / "init").unlink(missing_ok=True)
        phases = FORKS.RawArray("b", self.world)
        common = (self.world, self.kind, self.folder, phases)
        events = [None if kill_at is None else kill_at.get(rank, 0) for rank in range(self.world)]
        ranks = [
            FORKS.Process(target=guarded, args=(rank, *common, event))
            for rank, event in enumerate(events)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + TIMEOUT_S
        while 0 in list(phases) and all(p.is_alive() for p in ranks):
            time.sleep(0.001)
            assert time.monotonic() < deadline, self.logs()
        begun, seen = time.monotonic(), list(phases)
        if moment_s is not None:
            time.sleep(moment_s)
            seen = [phases[rank] for rank in victims if ranks[rank].is_alive()]
            for rank in victims:
                ranks[rank].kill()
        for process in ranks:
            process.join(max(0, deadline - time.monotonic()))
        late = [process.kill() for process in ranks if process.is_alive()]
        assert not late, f"ranks did not notice that {victims} died:\n{self.logs()}"
        return [process.exitcode for process in ranks], seen, time.monotonic() - begun

    def logs(self):
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("log-*")))

    def digests(self):
        """By step, what all ranks of all runs noted so far."""
        found = {}
        for file in self.folder.glob("lines-*"):
            for line in re.findall(r"^(\d+) (\w{16})\n", file.read_text(), re.M):
                found.setdefault(int(line[0]), set()).add(line[1])
        return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """By kind and number of ranks, digests of a run that nothing interrupts, and its seconds."""
    known = {}

    def of(kind, world):
        if (kind, world) not in known:
            runs = Runs(kind, world, tmp_path_factory.mktemp("whole") / "run")
            codes, _, seconds = runs.run()
            assert set(codes) == {0}, runs.logs()
            digests = runs.digests()
            assert sorted(digests) == list(range(STEPS + 1))
            assert all(len(same) == 1 for same in digests.values())
            known[kind, world] = digests, seconds
        return known[kind, world]

    return of


def check_bits(runs, expected):
    for step, found in runs.digests().items():
        assert found == expected[step], f"step {step} after a kill:\n{runs.logs()}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_killed_at_any_moment(world, kind, uninterrupted, tmp_path):
    expected, seconds = uninterrupted(kind, world)
    runs, generator, hits = Runs(kind, world, tmp_path / "run"), random.Random(SEED), Counter()
    while hits["kills"] < KILLS:
        if runs.newest() == STEPS:
            runs.forget()
            hits["whole runs"] += 1
        moment = generator.uniform(0, seconds * (1 - runs.newest() / STEPS))
        one = [generator.randrange(world)]
        victims = generator.choice([one, one, list(range(world))])
        codes, seen, _ = runs.run(moment, victims)
        check_bits(runs, expected)
        if -signal.SIGKILL not in codes:
            assert set(codes) == {0}, runs.logs()
            continue
        hits["kills"] += 1
        hits["kills while saving"] += SAVING in seen
        hits["kills of all ranks"] += len(victims) == world
    codes, *_ = runs.run()
    assert set(codes) == {0}, runs.logs()
    check_bits(runs, expected)
    assert runs.newest() == STEPS
    print(f"{kind}, {world} ranks: {dict(hits)}")


@pytest.mark.parametrize("kind", KINDS)
def test_killed_between_any_two_files(kind, uninterrupted, tmp_path):
    """Each run continues what the last one, killed at an earlier event, has left."""
    expected, _ = uninterrupted(kind, 2)
    runs = Runs(kind, 2, tmp_path / "run")
    counts, stride = [], STRIDES.get(kind, 1)
    for rank in (0, 1):
        counts.append(0)
        while True:
            if runs.newest() > STEPS - 2 * EVERY:
                runs.forget()
            codes, *_ = runs.run(kill_at={rank: 1 + stride * counts[rank]})
            check_bits(runs, expected)
            if codes == [0, 0]:
                break
            assert codes[rank] == -signal.SIGKILL, runs.logs()
            counts[rank] += 1
    least = {"one file": [3, 0], "folder": [4, 1], "LAMB": [5, 2]}[kind]
    assert all(count >= low for count, low in zip(counts, least, strict=True)), counts
    print(f"{kind}: killed before {counts} changes of files, by rank")
