"""A fresh place for each test; wheels of sources are built once, others are in dist/."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "tests"), str(FOLDER.parent.parent)]

from environments import ROOT, build_wheel  # noqa: E402
from places import Place  # noqa: E402


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Wheels without kernels, as `pip install ./packages/apex-amp` makes them."""
    folder = tmp_path_factory.mktemp("sources")
    packages = ("apex-amp", "apex-optimizers")
    return {p: build_wheel(ROOT / "packages" / p, folder / p) for p in packages}
