"""The guide to amp: its examples run, and it names every argument that is new."""

import inspect
import re
from pathlib import Path

import pytest

from apex import amp
from apex_testkit.fresh_amp import fresh_amp  # noqa: F401  (fixture)

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "moving-amp.md"
TEXT = GUIDE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(1, len(BLOCKS) + 1))
def test_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "example", "exec"), {"__name__": "example"})


def test_names_what_is_new():
    parameters = inspect.signature(amp.initialize).parameters.values()
    new = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert new
    assert all(name in TEXT for name in new)
