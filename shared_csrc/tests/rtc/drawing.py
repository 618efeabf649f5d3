"""The library of an op whose kernel draws a line, and what the fakes' cards are."""

import ctypes
import subprocess
from pathlib import Path

from shared_csrc.native import rtc, targets, toolchain

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent

COUNT, SLOPE, OFFSET = 40, 0.5, 3.25
EXPECTED = [SLOPE * i + OFFSET for i in range(COUNT)]
CAPABILITIES = {0: (9, 0), 1: (9, 0), 2: (12, 1), 3: (7, 0), 4: (6, 1), 5: (8, 0), 70: (9, 0)}


def built_drawn(folder, include=toolchain.INCLUDE):
    """The library of an op: what the builder makes for gpu-rtc, but for torch."""
    built = folder / "drawn.so"
    flags = toolchain.compile_flags(targets.Target(toolchain.RTC))
    flags = [flag.replace(str(toolchain.INCLUDE), str(include)) for flag in flags]
    flags += [f"-I{include}", '-DAPEX_RTC_UNIT="drawn"', "-shared", "-Werror"]
    command = [*toolchain.find_cxx(), *flags, str(HERE / "drawn" / "drawn.cpp"), "-o", str(built)]
    subprocess.run(command, check=True, timeout=300)
    return built


def forget(monkeypatch):
    """Forget what this process has loaded, as another one would know nothing of it."""
    for name, empty in (("_loaded", {}), ("_count", 0), ("_unusable", set())):
        monkeypatch.setattr(rtc, name, empty)
    rtc._headers.cache_clear()


def draw(library, device=0, threads=64, shared_bytes=0, in_clusters=False):
    """Launch; return the result, or what was raised."""
    y = (ctypes.c_float * COUNT)()
    slope, offset = ctypes.c_float(SLOPE), ctypes.c_double(OFFSET)
    shared = ctypes.c_size_t(shared_bytes)
    said = library.apex_draw(device, threads, y, COUNT, slope, offset, shared, in_clusters)
    return said.decode() if said else list(y)
