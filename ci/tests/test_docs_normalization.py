"""The pages on normalization: their examples run, and nothing is missing on them."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "normalization"
PAGES = [*sorted(FOLDER.glob("*.md")), ROOT / "docs" / "guides" / "moving-normalization.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXAMPLES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.findall(page.read_text()), start=1)
]


def test_every_page_with_code_is_run():
    assert len(PAGES) >= 7
    assert all(BLOCK.search(page.read_text()) for page in PAGES)


@pytest.mark.parametrize("block", EXAMPLES)
def test_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "example", "exec"), {"__name__": "example"})


def test_every_function_of_the_module_stands_on_its_page_with_its_arguments():
    module = importlib.import_module("fused_layer_norm_cuda")
    text = (FOLDER / "fused_layer_norm_cuda.md").read_text()
    written = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.M))
    items = {name: getattr(module, name) for name in module.__all__}
    signatures = {
        name: inspect.signature(item)
        for name, item in items.items()
        if inspect.isfunction(inspect.unwrap(item))
    }
    assert signatures
    for name, signature in signatures.items():
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
        assert written[name] == text.strip("()")


def test_the_overview_links_to_every_page():
    text = (FOLDER / "README.md").read_text()
    for page in FOLDER.glob("*.md"):
        assert page.stem == "README" or f"({page.name})" in text
