"""The guide to amp: its examples run, and it names every argument that is new."""

import inspect
import re
from pathlib import Path

import pytest

from apex import amp
from apex.amp._amp_state import AmpState, _amp_state

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "moving-amp.md"
TEXT = GUIDE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)


@pytest.fixture(autouse=True)
def _fresh_amp():
    yield
    if hasattr(_amp_state, "handle"):
        _amp_state.handle._deactivate()
    _amp_state.__dict__.clear()
    _amp_state.__dict__.update(AmpState().__dict__)


@pytest.mark.parametrize("block", BLOCKS, ids=range(1, len(BLOCKS) + 1))
def test_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "example", "exec"), {"__name__": "example"})


def test_names_what_is_new():
    parameters = inspect.signature(amp.initialize).parameters.values()
    new = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert new
    assert all(name in TEXT for name in new)
