"""The page about DistributedDataParallel: its examples run as they stand, one after the other."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from apex import _lost_ranks
from apex.parallel.ddp import checks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "parallel" / "distributed.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@pytest.fixture
def no_process_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_examples_run(no_process_group):
    names = {"__name__": "example"}
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "example", "exec"), names)
    gradients = [param.grad for param in names["model"].parameters()]
    assert all(grad is not None for grad in gradients)


def test_quoted_errors_are_those_of_the_code():
    sources = "".join(file.read_text() for file in Path(checks.__file__).parent.glob("*.py"))
    sources = " ".join(re.sub(r'"\s*\n\s*f?"', "", sources).split())
    quoted = re.findall(r"^\| `([^`]+)`", PAGE.read_text().partition("## Errors")[2], re.M)
    assert len(quoted) == 4
    assert [text for text in quoted if text not in sources] == []
    assert f"for {_lost_ranks.ANSWER_S:g} s" in PAGE.read_text()
    assert (
        f"docs/parallel/{PAGE.name}"
        in (ROOT / "packages" / "apex-parallel" / "README.md").read_text()
    )
