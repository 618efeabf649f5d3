"""Trains a small GPT in every layout, as the README says, and compares the losses.

``APEX_KILLS`` sets how many times a rank is killed in each divided layout, ``APEX_SEED`` when.
"""

import json
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

TRAIN = Path(__file__).with_name("train.py")
TIMEOUT_S = 240
KILLS = int(os.environ.get("APEX_KILLS", "2"))  # of each divided layout
STEPS = 6
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 32}
BATCHES = {"micro-batch-size": 2, "global-batch-size": 8}
SMALL = {**SIZES, **BATCHES, "text-bytes": 30_000, "steps": STEPS, "validate-every": 3}
TP, PP = "--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2"
DIVIDED = "--optimizer=DistributedFusedAdam"
LAYOUTS = {
    "PP=2": (2, [PP]),
    "TP=2 x PP=2, sequence parallel": (4, [TP, PP, "--sequence-parallel"]),
    "DP=2": (2, []),
    "TP=2 x DP=2, state divided": (4, [TP, "--sequence-parallel", DIVIDED]),
}
# Each rank is forked from a server that has imported what costs seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "pytest"])


def arguments(output, options):
    return [*(f"--{name}={value}" for name, value in SMALL.items()), f"--output={output}", *options]


def one_rank(rank, processes, port, logs, arguments):
    """What torchrun would start; the parent keeps the store, as torchrun does."""
    with open(logs[rank], "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if processes > 1:
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        os.environ |= where | numbers | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    sys.path.insert(0, str(TRAIN.parent))
    sys.argv = [str(TRAIN), *arguments]
    runpy.run_path(str(TRAIN), run_name="__main__")


class Run:
    """A run under way in the folder ``output``."""

    def __init__(self, output, processes, options):
        output.mkdir(exist_ok=True)
        self.logs = [output / f"log-{rank}.txt" for rank in range(processes)]
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        common = (processes, self.store.port, self.logs, arguments(output, options))
        self.ranks = [FORKS.Process(target=one_rank, args=(r, *common)) for r in range(processes)]
        for process in self.ranks:
            process.start()

    def finish(self, timeout_s=TIMEOUT_S):
        """Exit codes of all ranks, and what each of them wrote."""
        deadline = time.monotonic() + timeout_s
        for process in self.ranks:
            process.join(max(0, deadline - time.monotonic()))
        late = [process.kill() for process in self.ranks if process.is_alive()]
        for process in self.ranks:
            process.join()
        texts = self.texts()
        assert not late, f"not done after {timeout_s} s:\n{texts}"
        return [process.exitcode for process in self.ranks], texts

    def texts(self):
        return [log.read_text() if log.exists() else "" for log in self.logs]


def run(output, processes, options):
    """Exit codes of all ranks, and what they wrote."""
    codes, texts = Run(output, processes, options).finish()
    return codes, "\n".join(texts)


def train(output, processes=1, options=()):
    """The records of a run that succeeds."""
    codes, text = run(output, processes, options)
    assert set(codes) == {0}, text
    return records(output)


def records(output):
    """What a run wrote of its steps, without its speed."""
    steps = json.loads((output / "history.json").read_text())["steps"]
    return [{k: v for k, v in record.items() if k != "tokens_per_s"} for record in steps]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Folder and records of the run that the others are compared with."""
    folder = tmp_path_factory.mktemp("one_process")
    return folder, train(folder, options=["--save-every=5", f"--plot={folder / 'loss.png'}"])


def plain_loss(state, rows):
    """The same GPT in plain PyTorch and the weights' dtype: nats per byte of [rows, bytes + 1]."""
    heads, per_head = SIZES["heads"], SIZES["hidden"] // SIZES["heads"]
    norm = lambda x, name: F.layer_norm(
        x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"]
    )
    linear = lambda x, name: F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))
    angles = torch.arange(rows.shape[1] - 1)[:, None] * 10_000.0 ** (
        -torch.arange(0, per_head, 2, dtype=torch.float64) / per_head
    )
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(t):
        turned = torch.complex(*t.chunk(2, dim=-1)) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    x = state["embedding.weight"][rows[:, :-1]]
    for layer in (f"layers.{i}" for i in range(SIZES["layers"])):
        mixed = linear(norm(x, f"{layer}.attention_norm"), f"{layer}.attention.query_key_value")
        q, k, v = mixed.unflatten(2, (heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        seen = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + linear(seen.transpose(1, 2).flatten(2), f"{layer}.attention.output")
        hidden = F.gelu(linear(norm(x, f"{layer}.perceptron_norm"), f"{layer}.up"))
        x = x + linear(hidden, f"{layer}.down")
    return F.cross_entropy(linear(norm(x, "norm"), "head").flatten(0, 1), rows[:, 1:].flatten())


def test_loss_is_that_of_plain_pytorch_in_float64(one_process):
    folder, found = one_process
    checkpoint = torch.load(folder / "step-00000005" / "stage0-tensor0.pt", weights_only=True)
    state = {name: weight.double() for name, weight in checkpoint["model"].items()}
    text = (folder / f"text-{SMALL['text-bytes']}.bin").read_bytes()
    train_part = torch.tensor(list(text[: -int(len(text) * 0.05)]))
    generator = torch.Generator().manual_seed(2 * 5)  # of step 5
    places = torch.randint(len(train_part) - SIZES["sequence"], (8,), generator=generator)
    rows = train_part[places[:, None] + torch.arange(SIZES["sequence"] + 1)]
    assert found[5]["loss"] == pytest.approx(plain_loss(state, rows).item(), rel=1e-6)


def test_plot(one_process):
    assert (one_process[0] / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_bfloat16_is_close_to_float32(one_process, tmp_path):
    """Products of 8 bits: losses of 5.5 agree to a thousandth, and are not the same."""
    found = train(tmp_path, 2, [TP, "--dtype=bfloat16"])
    for record, expected in zip(found, one_process[1], strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert record["loss"] != expected["loss"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_losses_of_one_process(layout, one_process, tmp_path):
    """Sums are rounded in another order: float32 keeps seven digits."""
    found = train(tmp_path, *LAYOUTS[layout])
    assert len(found) == STEPS
    for record, expected in zip(found, one_process[1], strict=True):
        assert record == pytest.approx(expected, rel=1e-6)
    assert found[-1]["loss"] < found[0]["loss"] - 0.1


def test_tensor_parallel_by_the_command_of_the_readme(one_process, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, str(TRAIN), *arguments(tmp_path, [TP])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for record, expected in zip(records(tmp_path), one_process[1], strict=True):
        assert record == pytest.approx(expected, rel=1e-6)


def test_resumes_bit_for_bit_and_only_in_its_layout(tmp_path):
    processes, options = LAYOUTS["TP=2 x PP=2, sequence parallel"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = train(whole, processes, options)
    train(parts, processes, [*options, "--stop-after=3"])
    assert train(parts, processes, options) == expected
    assert_same_end(whole, parts, processes)
    codes, written = run(parts, 1, [])
    assert codes == [1]
    assert "is a checkpoint of another run or layout" in written


def test_a_divided_state_goes_on_with_fewer_replicas_and_with_torch(one_process, tmp_path):
    """Four replicas, then two, then one with torch's AdamW: the losses of one process all along."""
    train(tmp_path, 4, [DIVIDED, "--stop-after=2"])
    train(tmp_path, 2, [DIVIDED, "--stop-after=4"])
    found = train(tmp_path, options=["--optimizer=AdamW"])
    assert len(found) == STEPS
    for record, expected in zip(found, one_process[1], strict=True):
        assert record == pytest.approx(expected, rel=1e-6)


def test_torchs_own_operations_begin_what_apexs_continue(one_process, tmp_path):
    """The losses of --plain are those of one process, and so are those of the run that goes on."""
    train(tmp_path, options=["--plain", "--stop-after=3"])
    found = train(tmp_path)
    assert len(found) == STEPS
    for record, expected in zip(found, one_process[1], strict=True):
        assert record == pytest.approx(expected, rel=1e-6)


def assert_same(a, b):
    """Every tensor has the same bits."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, dict):
            assert_same(value, b[name])
        else:
            assert torch.as_tensor(value).equal(torch.as_tensor(b[name])), name


def assert_same_end(whole, parts, processes):
    """The last checkpoints of two runs have the same bits."""
    last = f"step-{STEPS:08d}"
    files = sorted((whole / last).iterdir())
    assert len(files) == processes
    for file in files:
        a, b = (torch.load(f, weights_only=True) for f in (file, parts / last / file.name))
        assert_same(a["model"], b["model"])
        assert_same(a["optimizer"]["state"], b["optimizer"]["state"])


KILLED = {
    "TP=2": (2, [TP, "--sequence-parallel"]),
    "PP=2": (2, [PP]),
    "TP=2 x PP=2": (4, [TP, PP]),
}
# What a survivor says: its number, what it was at, who may have failed, and what to do.
LOST = re.compile(
    r"RuntimeError: (?:.* )?\(?rank (\d)\)?: (.+) failed\. (?:No word from rank [\d, ]+ for 2 s|"
    r"Rank [\d, ]+ failed too|The store of).* start again from a checkpoint"
)


@pytest.mark.parametrize("layout", KILLED)
def test_a_killed_rank_ends_the_others_and_the_run_goes_on(layout, tmp_path):
    """SIGKILL of a rank by chance; others end with an error, the run with its undisturbed bits."""
    processes, options = KILLED[layout]
    options = [*options, "--save-every=1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    begun = time.monotonic()
    expected = train(whole, processes, options)
    step_s = (time.monotonic() - begun) / STEPS
    generator, hits = random.Random(f"{layout} {os.environ.get('APEX_SEED', 0)}"), Counter()
    while hits.total() < KILLS:
        victim, delay_s = generator.randrange(processes), generator.uniform(0, step_s)
        saved = min(newest(parts) + generator.randrange(1, 3), STEPS - 1)
        hits.update(killed(Run(parts, processes, options), parts, saved, victim, delay_s))
        if newest(parts) == STEPS:
            assert_same_end(whole, parts, processes)
        if newest(parts) > STEPS - 2 and hits.total() < KILLS:  # no step more to be killed in
            shutil.rmtree(parts)
    assert train(parts, processes, options) == expected
    assert_same_end(whole, parts, processes)
    print(f"{layout}: {hits.total()} kills, in which others were at {dict(hits)}")


def newest(output):
    """The step of the newest checkpoint."""
    return max((int(folder.name[5:]) for folder in output.glob("step-*")), default=0)


def killed(running, output, saved, victim, delay_s):
    """Kill a rank ``delay_s`` after there is a checkpoint of step ``saved``.

    Returns what a survivor was at, in a list; empty if the run was at its end already.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while newest(output) < saved and running.ranks[victim].is_alive():
        assert time.monotonic() < deadline, running.texts()
        time.sleep(0.002)
    time.sleep(delay_s)
    running.ranks[victim].kill()
    codes, texts = running.finish(timeout_s=60)
    if codes[victim] == 0 or newest(output) == STEPS:
        assert set(codes) <= {0, 1, -signal.SIGKILL}, (codes, texts)
        return []
    assert codes[victim] == -signal.SIGKILL, (codes, texts)
    whats = []
    for rank in {*range(len(codes))} - {victim}:
        assert codes[rank] == 1, (codes, texts)  # an error, not a signal and not success
        said = LOST.findall(texts[rank])
        assert [int(number) for number, _ in said] == [rank], texts[rank]
        whats += [re.sub(r"\d+", "N", what) for _, what in said]
    return whats[:1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--layers=3", PP], "--layers: 3 are not divisible by 2 stages"),
        (["--plain", PP], "--plain: expected one process"),
        (["--plain", "--optimizer=FusedAdam"], "--plain: FusedAdam is not torch's"),
        (["--sequence-parallel"], "--sequence-parallel: 32 tokens on 1 tensor-parallel ranks"),
        (["--text-bytes=100"], "--text-bytes: 100 bytes are too few"),
    ],
)
def test_sizes_that_do_not_fit(options, text, tmp_path):
    codes, written = run(tmp_path, 2 if PP in options else 1, options)
    assert 0 not in codes
    assert text in written
