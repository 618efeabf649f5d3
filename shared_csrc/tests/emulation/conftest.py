"""Compiles the planted bugs once, as kernels are compiled for the emulated GPU."""

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def planted(tmp_path_factory, compile_emulated) -> Path:
    return compile_emulated(tmp_path_factory.mktemp("planted"), *sorted(HERE.glob("*.cpp")))
