"""The first two pages: their code runs and trains, and what they say of packages holds."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("index", "quickstart")}
EXAMPLES = [
    pytest.param(block, id=f"{name}-{number}")
    for name, page in PAGES.items()
    for number, block in enumerate(BLOCK.findall(page), start=1)
]


@pytest.mark.parametrize("block", EXAMPLES)
def test_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "example", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("name", PAGES)
def test_the_first_example_trains(name):
    import torch

    torch.manual_seed(0)
    code = BLOCK.search(PAGES[name])[1]
    names = {"__name__": "example"}
    exec(compile(code.replace("range(200)", "range(1)"), "example", "exec"), names)
    before = names["loss"].item()
    exec(compile(code, "example", "exec"), names)
    assert names["loss"].item() < before / 20
    assert isinstance(names["optimizer"], names["FusedAdam"])


def test_ten_lines_are_ten():
    code = BLOCK.search(PAGES["index"])[1].splitlines()
    assert sum(bool(line) and not line.startswith(("import", "from")) for line in code) == 10


def test_every_package_is_on_the_front():
    packages = {p.parent.name for p in ROOT.glob("packages/*/pyproject.toml")}
    installs = set(re.findall(r"`pip install (apex-\w+)` \|", PAGES["index"]))
    assert installs == packages
    for module, name in re.findall(r"`from ([\w.]+) import (\w+)` \|", PAGES["index"]):
        assert hasattr(__import__(module, fromlist=[name]), name)


def test_the_front_says_where_it_never_ran():
    assert re.search(r"^\| never run on \| .*\*\*any card\*\* \|$", PAGES["index"], re.M)
