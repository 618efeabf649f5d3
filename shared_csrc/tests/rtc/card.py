"""A card that is not there: a pytest plugin, with which ops for GPUs serve CPU tensors.

An op's library for gpu-rtc, that of the wheel or one that is built, is loaded as on a machine with
a card. torch's and the driver's part is played by fakes; kernels are "compiled" by g++ for the
emulated GPU, asked for and launched as NVRTC's are, or HIPRTC's.
"""

import ctypes
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent
sys.path.insert(0, str(SHARED.parent))

from shared_csrc.native import toolchain  # noqa: E402

FOLDER, MAKER = "APEX_FAKE_CARD", "APEX_FAKE_MAKER"
CAPABILITIES = {0: (9, 0), 1: (12, 0)}
AMD = {0: "gfx942", 1: "gfx1100"}
PACKAGES = ("amp", "contrib", "normalization", "optimizers", "parallel")
# Of a maker: the driver's library, torch's, and its cards.
LIBRARIES = {
    "nvidia": ("libcuda.so.1", "libtorch_cuda.so", ("sm_90", "sm_120")),
    "amd": ("libamdhip64.so.6", "libtorch_hip.so", tuple(AMD.values())),
}


def build(folder: Path, maker: str) -> dict[str, str]:
    """Compile the fakes into a folder; return the environment of processes that have the card."""
    driver, card = (folder / name for name in LIBRARIES[maker][:2])
    build_driver(driver)
    hidden = ("-fvisibility=hidden", "-DAPEX_EMULATE_TENSORS")
    emulator = [flag for flag in toolchain.emulator_flags() if flag not in hidden]
    wrapped = [f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset")]
    words = [*emulator, f"-I{SHARED}", *wrapped, str(HERE / "card.cpp")]
    _build([*words, str(driver), "-ldl"], card)
    return {FOLDER: str(folder), MAKER: maker, "APEX_EMULATE": "32", "APEX_JIT": "1"}


def build_driver(library: Path) -> None:
    """Compile the fakes of a driver and of its compiler, which are one library."""
    _build(["-std=c++20", str(HERE / "fakes.cpp")], library)


def _build(words: list[str], library: Path) -> None:
    common = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    command = [*toolchain.find_cxx(), *common, *words, "-o", str(library)]
    subprocess.run(command, check=True, timeout=300)


def compiler() -> str:
    """Return the command that makes a program of a kernel a library for the emulated GPU."""
    first = [str(toolchain.EMULATION / "backend.h"), str(HERE / "emulated.h")]
    words = [*toolchain.find_cxx(), "-std=c++20", "-O0", "-fPIC", "-shared", "-w", f"-I{SHARED}"]
    return " ".join([*words, *(word for file in first for word in ("-include", file))])


def insert() -> ctypes.CDLL:
    """Put the card into this process, before it loads an op; return the fake driver."""
    folder, maker = Path(os.environ[FOLDER]), os.environ[MAKER]
    driver_name, torch_name, architectures = LIBRARIES[maker]
    driver = ctypes.CDLL(str(folder / driver_name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / torch_name), ctypes.RTLD_GLOBAL)
    driver.fake_compiler(compiler().encode())
    for device, architecture in enumerate(architectures):
        driver.fake_card(device, architecture.encode())
    if maker == "amd":
        torch.version.hip = "6.4.43482"
        torch.cuda.get_device_properties = lambda n: SimpleNamespace(gcnArchName=f"{AMD[n]}:xnack-")
    else:
        torch.cuda.get_device_capability = CAPABILITIES.get
    for package in PACKAGES:
        if importlib.util.find_spec(f"apex.{package}") is not None:
            _connect(f"apex.{package}._shared.native", maker)
    return driver


def _connect(native: str, maker: str) -> None:
    jit, drivers, rtc, compatibility, nvrtc, hiprtc = (
        importlib.import_module(f"{native}.{name}")
        for name in ("jit", "drivers", "rtc", "compatibility", "nvrtc", "hiprtc")
    )
    jit.backend_of = lambda device_type: toolchain.RTC
    jit.backends_of = lambda device_type: (toolchain.RTC,)
    kind = hiprtc.Hiprtc if maker == "amd" else nvrtc.Nvrtc
    file, torch_file = (Path(os.environ[FOLDER], name) for name in LIBRARIES[maker][:2])
    drivers.compiler = rtc.compiler = compatibility.compiler = functools.cache(lambda: kind(file))
    stream = ctypes.CDLL(str(torch_file)).aoti_torch_get_current_cuda_stream
    rtc.current_stream = lambda: ctypes.cast(stream, drivers.CurrentStream)


def pytest_configure(config):
    config.fake_driver = insert()


def pytest_terminal_summary(terminalreporter, config):
    driver = config.fake_driver
    line = f"{driver.fake_launches()} launches, {driver.fake_compilations()} kernels compiled"
    terminalreporter.write_line(f"fake card: {line}")
