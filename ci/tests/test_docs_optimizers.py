"""The pages on optimizers: their examples run, and nothing is missing on them."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "optimizers"
PAGES = [*sorted(FOLDER.glob("*.md")), ROOT / "docs" / "guides" / "moving-optimizers.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXAMPLES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.findall(page.read_text()), start=1)
]


def optimizers():
    module = importlib.import_module("apex.optimizers")
    return [getattr(module, name) for name in module.__all__]


def page_of(optimizer) -> Path:
    return FOLDER / (optimizer.__module__.split(".")[-2] + ".md")


def rows(page: Path) -> list[list[str]]:
    """The cells of all tables of a page."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_page_with_code_is_run():
    assert {page.stem for page in PAGES} >= {"README", "amp_C", "moving-optimizers"}
    assert all(BLOCK.search(page.read_text()) for page in PAGES)


@pytest.mark.parametrize("block", EXAMPLES)
def test_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "example", "exec"), {"__name__": "example"})


def test_the_overview_links_to_every_page():
    text = (FOLDER / "README.md").read_text()
    for optimizer in optimizers():
        assert f"[{optimizer.__name__}]({page_of(optimizer).name})" in text


def test_every_function_of_amp_c_stands_on_its_page():
    module = importlib.import_module("amp_C")
    written = {cells[0]: cells[2] for cells in rows(FOLDER / "amp_C.md") if len(cells) == 4}
    for name in module.__all__:
        parameters = list(inspect.signature(getattr(module, name)).parameters.values())
        if name == "update_scale_hysteresis":
            continue
        own = [p.name + ("=None" if p.default is None else "") for p in parameters[3:]]
        assert written[f"`{name}`"] == f"`{', '.join(own)}`"
