"""A card that is not there: a pytest plugin, with which ops for NVIDIA GPUs serve CPU tensors.

An op's library for cuda-rtc, that of the wheel or one that is built, is loaded as on a machine with
a card. torch's and the driver's part is played by fakes; kernels are "compiled" by g++ for the
emulated GPU, asked for and launched as NVRTC's are.
"""

import ctypes
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent
sys.path.insert(0, str(SHARED.parent))

from shared_csrc.native import toolchain  # noqa: E402

FOLDER = "APEX_FAKE_CARD"
CAPABILITIES = {0: (9, 0), 1: (12, 0)}
PACKAGES = ("amp", "contrib", "normalization", "optimizers", "parallel")


def build(folder: Path) -> dict[str, str]:
    """Compile the fakes into a folder; return the environment of processes that have the card."""
    driver, card = folder / "libcuda.so.1", folder / "libtorch_cuda.so"
    build_driver(driver)
    hidden = ("-fvisibility=hidden", "-DAPEX_EMULATE_TENSORS")
    emulator = [flag for flag in toolchain.emulator_flags() if flag not in hidden]
    wrapped = [f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset")]
    words = [*emulator, f"-I{SHARED}", *wrapped, str(HERE / "card.cpp")]
    _build([*words, str(driver), "-ldl"], card)
    return {FOLDER: str(folder), "APEX_EMULATE": "32", "APEX_JIT": "1"}


def build_driver(library: Path) -> None:
    """Compile the fakes of libcuda and of libnvrtc, which are one library."""
    _build(["-std=c++20", str(HERE / "fakes.cpp")], library)


def _build(words: list[str], library: Path) -> None:
    common = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    command = [*toolchain.find_cxx(), *common, *words, "-o", str(library)]
    subprocess.run(command, check=True, timeout=300)


def compiler() -> str:
    """Return the command that makes a program for NVRTC a library for the emulated GPU."""
    first = [str(toolchain.EMULATION / "backend.h"), str(HERE / "emulated.h")]
    words = [*toolchain.find_cxx(), "-std=c++20", "-O0", "-fPIC", "-shared", "-w", f"-I{SHARED}"]
    return " ".join([*words, *(word for file in first for word in ("-include", file))])


def insert() -> ctypes.CDLL:
    """Put the card into this process, before it loads an op; return the fake driver."""
    folder = Path(os.environ[FOLDER])
    driver = ctypes.CDLL(str(folder / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / "libtorch_cuda.so"), ctypes.RTLD_GLOBAL)
    driver.fake_compiler(compiler().encode())
    for device, (major, minor) in CAPABILITIES.items():
        driver.fake_card(device, 10 * major + minor)
    torch.cuda.get_device_capability = CAPABILITIES.get
    for package in PACKAGES:
        if importlib.util.find_spec(f"apex.{package}") is not None:
            _connect(f"apex.{package}._shared.native", folder / "libcuda.so.1")
    return driver


def _connect(native: str, nvrtc_file: Path) -> None:
    jit, nvrtc, rtc, fitting = (
        importlib.import_module(f"{native}.{name}") for name in ("jit", "nvrtc", "rtc", "fitting")
    )
    jit.backend_of = lambda device_type: toolchain.RTC
    jit.backends_of = lambda device_type: (toolchain.RTC,)
    rtc.nvrtc = fitting.nvrtc = functools.cache(lambda: nvrtc.Nvrtc(nvrtc_file))


def pytest_configure(config):
    config.fake_driver = insert()


def pytest_terminal_summary(terminalreporter, config):
    driver = config.fake_driver
    line = f"{driver.fake_launches()} launches, {driver.fake_compilations()} kernels compiled"
    terminalreporter.write_line(f"fake card: {line}")
