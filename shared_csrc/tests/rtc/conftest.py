"""Fakes of NVRTC and of the driver, and an op's library that they serve."""

import ctypes
import shutil
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent.parent)]

import card  # noqa: E402
from drawing import CAPABILITIES, built_drawn, forget  # noqa: E402

from shared_csrc.native import nvrtc, rtc, toolchain  # noqa: E402


@pytest.fixture(scope="session")
def fakes(tmp_path_factory):
    """The fake driver, which is found by its name from now on, and the path of the fake NVRTC."""
    folder = tmp_path_factory.mktemp("fakes")
    built = folder / "libcuda.so.1"
    card.build_driver(built)
    driver = ctypes.CDLL(str(built))
    driver.fake_image.restype = driver.fake_symbol.restype = ctypes.c_char_p
    return driver, built


@pytest.fixture(scope="session")
def drawn(tmp_path_factory):
    return built_drawn(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="session")
def dependent(tmp_path_factory):
    """The same of headers that ask for dependent launches."""
    folder = tmp_path_factory.mktemp("dependent")
    shutil.copytree(toolchain.INCLUDE, include := folder / "include")
    shapes = include / "apex" / "core" / "gpu_shapes.h"
    text = shapes.read_text()
    was = "bool kDependentLaunches = false;"
    assert text.count(was) == 1
    shapes.write_text(text.replace(was, was.replace("false", "true")))
    return built_drawn(folder, include)


@pytest.fixture
def cache(tmp_path, monkeypatch, fakes):
    """An empty cache, in a process that has launched nothing yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("APEX_CACHE_DIR", str(folder))
    monkeypatch.setenv("APEX_JIT", "1")
    monkeypatch.setattr(rtc, "compiler", lambda: nvrtc.Nvrtc(fakes[1]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", CAPABILITIES.get)
    forget(monkeypatch)
    return folder


copies = iter(range(1000))


@pytest.fixture
def open_drawn(drawn, tmp_path):
    """Return a function that opens a copy of the library, which knows no kernel yet."""

    def opened(op_folder=HERE / "drawn", connects=True, built=None):
        copy = tmp_path / f"copy{next(copies)}.so"
        copy.write_bytes((built or drawn).read_bytes())
        library = ctypes.CDLL(str(copy))
        library.apex_draw.restype = ctypes.c_char_p
        if connects:
            rtc.connect(library, {"drawn": op_folder})
        return library

    return opened
