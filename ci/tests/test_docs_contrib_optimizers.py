"""The pages of contrib's optimizers: their examples run as they stand."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

import apex.contrib.optimizers as optimizers
from apex.contrib.optimizers.fused_sgd import FusedSGD

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "contrib"
LAMB, DEPRECATED = PAGES / "distributed_fused_lamb.md", PAGES / "deprecated_optimizers.md"
AVERAGES = PAGES / "fused_adam_swa.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@pytest.fixture
def one_process(monkeypatch):
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("page", "count"), [(LAMB, 2), (DEPRECATED, 1), (AVERAGES, 1)])
def test_examples_run(page, count, one_process):
    blocks = BLOCK.findall(page.read_text())
    assert len(blocks) == count
    for block in blocks:
        exec(compile(block, "example", "exec"), {"__name__": "example"})
        if dist.is_initialized():
            dist.destroy_process_group()
    assert (
        f"docs/contrib/{page.name}"
        in (ROOT / "packages" / "apex-contrib" / "README.md").read_text()
    )


def test_every_class_stands_on_the_page():
    names = re.findall(r"^\| `(\w+)` \| `[\w.]+` \|", DEPRECATED.read_text(), re.M)
    assert set(names) == {*optimizers.__all__, FusedSGD.__name__}
