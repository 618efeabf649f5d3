"""`--plain` of gpt and imagenet: nothing of Apex's, the same losses; and the record of both ways.

Both examples, which have modules of the same names, are trained by the benchmark in a process of
its own, in small.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from apex_testkit.bench_report import read_records

BENCHMARKS = Path(__file__).resolve().parents[2] / "packages" / "apex-parallel" / "benchmarks"
WATCHED = """
import json, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import bench_training as bench

small = "--layers=1 --hidden=32 --heads=4 --sequence=32 --text-bytes=30000"
bench.GPT["cpu"] = bench.Size(small, 2)
bench.IMAGENET["cpu"] = bench.Size("-a resnet18 --image-size=16 --b=16", 2)
bench.WARM_UP = 1
found, measure = {}, bench.measure

class Namespaces(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.seen.add(function.namespace)
        return function(*arguments, **(options or {}))

def from_apex(training):
    parts = [training.optimizer, *training.model.modules()]
    names = {c.__module__.split(".")[0] for part in parts for c in type(part).__mro__}
    with Namespaces() as called:
        # Where a plain step updates, its own autocast has ended: another is that of apex.amp.
        training.optimizer.register_step_pre_hook(
            lambda *_: called.seen.add("apex's casts") if torch.is_autocast_enabled("cpu") else None
        )
        training.step()
    return sorted(n for n in names | called.seen if n.startswith("apex"))

def watched(name, work, dtype, make, *sizes):
    trainings = {way: make(way, dtype) for way in reversed(bench.WAYS)}
    losses = {way: [t.step() for _ in range(2)] for way, t in trainings.items()}
    found[f"{name} {dtype}"] = {
        "losses": {
            way: [float(s["loss"] if isinstance(s, dict) else s[0]) for s in steps]
            for way, steps in losses.items()
        },
        "apex": {way: from_apex(t) for way, t in trainings.items()},
    }
    if dtype == "float32":
        measure(name, work, dtype, make, *sizes)

bench.measure = watched
bench.main()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each case showed, and the records."""
    record = tmp_path_factory.mktemp("record") / "training.csv"
    own = {"APEX_BENCH_RECORDS": str(record), "APEX_BENCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    own |= {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([*map(str, (BENCHMARKS, *sys.path))]),
    }
    command = [sys.executable, "-c", WATCHED]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=os.environ | own
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), read_records(record)


CASES = [f"{name} {dtype}" for name in ("gpt", "imagenet") for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize("case", CASES)
def test_plain_has_nothing_of_apexs(case, trained):
    """Neither classes of the model and the optimizer nor operators that a step calls."""
    found = trained[0][case]["apex"]
    assert found["torch"] == []
    assert "apex" in found["apex"]
    assert "apex_optimizers" in found["apex"]


@pytest.mark.parametrize("case", CASES)
def test_both_ways_have_the_same_losses(case, trained):
    """Before and after an update, in float32; 8 bits of products change the third digit."""
    losses = trained[0][case]["losses"]
    tolerance = 1e-5 if case.endswith("float32") else 2e-2
    assert losses["apex"] == pytest.approx(losses["torch"], rel=tolerance)
    assert losses["apex"][0] != losses["apex"][1]


def test_the_record_has_both_ways_of_each_case(trained):
    records = trained[1]
    ways = [(r["op"], r["case"], r["contestant"]) for r in records]
    ops = ("training gpt", "training imagenet")
    assert ways == [(op, "float32", way) for op in ops for way in ("apex", "torch")]
    for record in records:
        assert (record["device"], record["threads"], record["samples"]) == ("cpu", 1, 2)
        is_gpt = "gpt" in record["op"]
        assert record["work"] == ("tokens" if is_gpt else "pictures")
        assert record["work_per_step"] == (16 * 32 if is_gpt else 16)
        assert record["median_us"] > 0
        assert 0 < record["loss"] < 2 * math.log(256)
        if Path("/proc/self/clear_refs").exists():
            assert record["peak_bytes"] > 100_000
