"""The pages about pipelines and tensor parallelism: examples train; names, links."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from apex.transformer import tensor_parallel

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: f"docs/transformer/{name}.md" for name in ("pipeline_parallel", "tensor_parallel")}
TEXTS = {name: (ROOT / page).read_text() for name, page in PAGES.items()}


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


def test_names_on_the_page_are_there():
    table = TEXTS["tensor_parallel"].partition("## Names")[2].partition("## Differences")[0]
    names = re.findall(r"^\| `([\w.]+)", table, re.M)
    assert len(names) >= 9
    for name in names:
        there = name if name.startswith("apex.") else f"{tensor_parallel.__name__}.{name}"
        assert pkgutil.resolve_name(there), name


def test_the_guide_to_megatron_adds_a_products_gradient():
    text = (ROOT / "docs" / "guides" / "megatron.md").read_text()
    names = {}
    exec(re.search(r"^```python\n(.*?)^```", text, re.M | re.S)[1], names)
    x, dy = names["x"].double(), names["grad_output"].double()
    torch.testing.assert_close(names["main_grad"].double(), dy.T @ x, rtol=1e-5, atol=1e-5)
