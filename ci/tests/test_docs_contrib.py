"""Pages of contrib and transformer ops, and contrib's README: their examples run as they stand."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

from ci.workspace import MATRIX

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "packages" / "apex-contrib" / "README.md"
# The folder of pages: the package whose module has a page's name, and the README that links to it.
FOLDERS = {
    "contrib": ("apex.contrib", README),
    "transformer": (
        "apex.transformer.functional",
        ROOT / "packages" / "apex-parallel" / "README.md",
    ),
}
# Pages of one function; test_docs_transformer.py has the others.
PAGES = sorted(
    page
    for folder in FOLDERS
    for page in (ROOT / "docs" / folder).glob("*.md")
    if page.read_text().splitlines()[0].removeprefix("# ").isidentifier()
)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXAMPLES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in (README, *PAGES)
    for number, block in enumerate(BLOCK.findall(page.read_text()), start=1)
]


def test_every_op_has_an_example():
    text = README.read_text()
    assert len(BLOCK.findall(text)) == text.count("compares it with")
    assert all(BLOCK.search(page.read_text()) for page in PAGES)


@pytest.mark.parametrize("block", EXAMPLES)
def test_example_runs(block):
    exec(compile(block, "example", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_argument_stands_on_the_page_with_its_default(page):
    text = page.read_text()
    title = text.splitlines()[0].removeprefix("# ")
    package, _ = FOLDERS[page.parent.name]
    if (ROOT / "packages/apex-contrib/src/apex/contrib/optimizers" / f"{page.stem}.py").is_file():
        package = "apex.contrib.optimizers"
    elif not importlib.util.find_spec(f"{package}.{page.stem}"):
        package = "apex"
    documented = getattr(importlib.import_module(f"{package}.{page.stem}"), title)
    if inspect.ismodule(documented):  # Apex calls both so
        documented = getattr(documented, title)
    if not (isinstance(documented, type) and issubclass(documented, torch.nn.Module)):
        documented = getattr(documented, "apply", documented)
    own = inspect.signature(documented).parameters
    cells = re.findall(r"^\| `(\w+)` \| `?([\w.-]+|\([\d., ]+\))`? \|", text, re.M)
    expected = {n: "required" if p.default is p.empty else str(p.default) for n, p in own.items()}
    assert {n: default for n, default in cells if n in own} == expected


def test_the_page_of_torchsched_names_versions_that_ci_runs():
    page = (ROOT / "docs" / "contrib" / "torchsched.md").read_text()
    named = re.findall(r"^\| (\d+\.\d+) \|", page, re.M)
    tested = [version.rpartition(".")[0] for version in MATRIX["torch"]["versions"]]
    assert named == [version for version in tested if version in named]
    assert MATRIX["torch"]["build"].rpartition(".")[0] in named


def test_the_readmes_link_to_every_page():
    for page in PAGES:
        folder = page.parent.name
        assert f"docs/{folder}/{page.name}" in FOLDERS[folder][1].read_text()
        assert f"(docs/{folder})" in (ROOT / "README.md").read_text()
