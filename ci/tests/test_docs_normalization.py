"""The pages on normalization: their examples run, their tables name the arguments that exist."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import apex.normalization
from apex.normalization import fused_layer_norm

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "normalization"
PAGES = [*sorted(FOLDER.glob("*.md")), ROOT / "docs" / "guides" / "moving-normalization.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXAMPLES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.findall(page.read_text()), start=1)
]
# Page, and what it has tables of: by an argument a row, or by a function a row.
BY_ARGUMENT = {
    "fused_layer_norm.md": apex.normalization.FusedLayerNorm,
    "fused_rms_norm.md": apex.normalization.FusedRMSNorm,
    "from_torch.md": apex.normalization.from_torch,
}
BY_FUNCTION = {
    "fused_layer_norm.md": (fused_layer_norm, re.compile(r"(mixed_dtype_)?fused_layer_norm\w*")),
    "fused_rms_norm.md": (fused_layer_norm, re.compile(r"\w*rms_norm(_affine)?")),
    "fused_add_norm.md": (apex.normalization, re.compile(r"fused_add_\w+")),
    "fused_layer_norm_cuda.md": (importlib.import_module("fused_layer_norm_cuda"), re.compile("")),
}


def rows(page: str) -> list[list[str]]:
    """The cells of all tables of a page."""
    lines = [line for line in (FOLDER / page).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def functions(module, pattern) -> list[str]:
    """Names in ``__all__`` of Python functions that fit."""
    names = [n for n in module.__all__ if pattern.match(n)]
    return [n for n in names if inspect.isfunction(inspect.unwrap(getattr(module, n)))]


def test_every_page_with_code_is_run():
    assert len(PAGES) >= 7
    assert all(BLOCK.search(page.read_text()) for page in PAGES)


@pytest.mark.parametrize("block", EXAMPLES)
def test_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "example", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", BY_ARGUMENT)
def test_every_argument_stands_on_the_page_with_its_default(page):
    own = inspect.signature(BY_ARGUMENT[page]).parameters
    written = {c[0].strip("`"): c[1].strip("`") for c in rows(page) if c[0].strip("`") in own}
    expected = {n: "required" if p.default is p.empty else str(p.default) for n, p in own.items()}
    assert written == expected


@pytest.mark.parametrize("page", BY_FUNCTION)
def test_every_function_stands_on_the_page_with_its_arguments(page):
    module, pattern = BY_FUNCTION[page]
    written = {cells[0].strip("`"): cells[1].strip("`") for cells in rows(page) if len(cells) > 1}
    names = functions(module, pattern)
    assert names
    for name in names:
        signature = inspect.signature(getattr(module, name))
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
        assert written[name] == text.strip("()")


def test_the_overview_links_to_every_page():
    text = (FOLDER / "README.md").read_text()
    for page in FOLDER.glob("*.md"):
        assert page.stem == "README" or f"({page.name})" in text
