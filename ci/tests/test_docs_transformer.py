"""The pages about pipelines and tensor parallelism: examples train; arguments, names, links."""

import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from apex.transformer import tensor_parallel
from apex.transformer.pipeline_parallel import get_forward_backward_func
from apex.transformer.pipeline_parallel.schedules import fwd_bwd_pipelining_with_interleaving as v
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_no_pipelining import (
    forward_backward_no_pipelining,
)

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: f"docs/transformer/{name}.md" for name in ("pipeline_parallel", "tensor_parallel")}
TEXTS = {name: (ROOT / page).read_text() for name, page in PAGES.items()}


def default_of(parameter):
    if parameter.default is parameter.empty:
        return "required"
    return getattr(parameter.default, "__name__", str(parameter.default))


def arguments(function):
    return {name: default_of(p) for name, p in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize(("name", "share"), [("pipeline_parallel", 0.5), ("tensor_parallel", 0.1)])
def test_example_trains_on_two_processes(name, share, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(re.search(r"^```python\n(.*?)^```", TEXTS[name], re.M | re.S)[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"loss ([\d.]+)", done.stdout))
    assert last < share * first


@pytest.mark.parametrize("name", PAGES)
def test_the_readme_links_to_the_page(name):
    assert PAGES[name] in (ROOT / "packages" / "apex-parallel" / "README.md").read_text()


def test_every_argument_of_schedules_stands_on_the_page_with_its_default():
    expected = arguments(forward_backward_no_pipelining)
    expected |= arguments(get_forward_backward_func(None, 2))
    expected |= arguments(v._forward_backward_pipelining_with_interleaving)
    expected.pop("kwargs")
    rows = re.findall(r"^\| `(\w+)` \| `?([\w.-]+)`? \|", TEXTS["pipeline_parallel"], re.M)
    assert dict(rows) == expected


@pytest.mark.parametrize("kind", ["Column", "Row"])
def test_every_argument_of_layers_stands_on_the_page_with_its_default(kind):
    rows = re.findall(r"^\| (`.*`) \| (\S+) \| (\w+) \|", TEXTS["tensor_parallel"], re.M)
    written = {
        name: default.strip("`")
        for names, default, whose in rows
        if whose in ("both", kind.lower())
        for name in re.findall(r"`(\w+)`", names)
    }
    assert written == arguments(getattr(tensor_parallel, f"{kind}ParallelLinear"))


def test_names_on_the_page_are_there():
    table = TEXTS["tensor_parallel"].partition("## Names")[2].partition("## Differences")[0]
    names = re.findall(r"^\| `([\w.]+)", table, re.M)
    assert len(names) >= 9
    for name in names:
        there = name if name.startswith("apex.") else f"{tensor_parallel.__name__}.{name}"
        assert pkgutil.resolve_name(there), name
