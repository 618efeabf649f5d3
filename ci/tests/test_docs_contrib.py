"""Pages of contrib and transformer ops, and contrib's README: their examples run as they stand."""

import re
from pathlib import Path

import pytest

from ci.workspace import MATRIX

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "packages" / "apex-contrib" / "README.md"
# The folder of pages, and the README that links to them.
FOLDERS = {"contrib": README, "transformer": ROOT / "packages" / "apex-parallel" / "README.md"}
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


def test_the_page_of_torchsched_names_versions_that_ci_runs():
    page = (ROOT / "docs" / "contrib" / "torchsched.md").read_text()
    named = re.findall(r"^\| (\d+\.\d+) \|", page, re.M)
    tested = [version.rpartition(".")[0] for version in MATRIX["torch"]["versions"]]
    assert named == [version for version in tested if version in named]
    assert MATRIX["torch"]["build"].rpartition(".")[0] in named


def test_the_readmes_link_to_every_page():
    for page in PAGES:
        folder = page.parent.name
        assert f"docs/{folder}/{page.name}" in FOLDERS[folder].read_text()
        assert f"(docs/{folder})" in (ROOT / "README.md").read_text()
