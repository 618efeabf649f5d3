"""The README of apex-contrib: its examples run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "packages" / "apex-contrib" / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)


def test_every_op_has_an_example():
    assert len(BLOCKS) == README.read_text().count("compares it with")


@pytest.mark.parametrize("block", BLOCKS)
def test_example_runs(block):
    exec(compile(block, "example", "exec"), {"__name__": "example"})
