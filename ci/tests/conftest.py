"""Wheels of sources, built once for all tests, and a fresh environment for each."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

from environments import PACKAGES, ROOT, Environment, build_wheel  # noqa: E402


@pytest.fixture(scope="session")
def source_wheels(tmp_path_factory) -> dict[str, Path]:
    """The wheel of each package, without kernels: quick to build, and the same Python files."""
    folder = tmp_path_factory.mktemp("wheels")
    return {p: build_wheel(ROOT / "packages" / p, folder / p) for p in PACKAGES}


@pytest.fixture
def environment(tmp_path) -> Iterator[Environment]:
    environment = Environment(tmp_path / "venv")
    yield environment
    environment.close()
