"""Compiles a GPU kernel at its first launch, for the card at hand, keeps it, and loads it.

A library for ``gpu-rtc`` has the host's half of ops alone (``apex/rtc/host.h``), and serves every
card of NVIDIA and AMD, CUDA 12 and 13 and ROCm. It asks here for each kernel that it
launches first: NVRTC or HIPRTC compiles it from the headers that the op includes, and the driver
loads it. What was compiled lies in the cache, by the rules of :mod:`.trust`; where it cannot lie
there, every process compiles anew.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from . import jit, toolchain, trust
from .drivers import LAUNCHING, CurrentStream, compiler, current_stream, driver
from .errors import BuildError
from .rtc_compiler import RuntimeCompiler
from .sources import included, without_torch

logger = logging.getLogger("apex")

STANDARD = toolchain.INCLUDE / "apex" / "rtc" / "standard.h"
# The driver copies parameters by sizes that are in the machine code: g++ must count the same ones.
_PARAMETERS = """\
template <class>
struct ParameterBytes;
template <class... Parameters>
struct ParameterBytes<void (*)(Parameters...)> {{
  static constexpr unsigned long count() {{
    unsigned long bytes = 0;
    ((bytes = (bytes + alignof(Parameters) - 1) / alignof(Parameters) * alignof(Parameters) +
              sizeof(Parameters)),
     ...);
    return bytes;
  }}
}};
static_assert(ParameterBytes<decltype(&{name})>::count() == {bytes},
              "the host's compiler counts other bytes of parameters");
"""
_UNFINISHED, _LONG_AGO_S = ".kernel-", 3600
_MANY = (10, 50, 200)  # a line when a process has compiled as many


class Kernel(ctypes.Structure):
    """A kernel of a library, as ``apex::RtcKernel`` has it."""

    _fields_ = (
        ("name", ctypes.c_char_p),  # of a type that has it as an argument, as a compiler mangles it
        ("unit", ctypes.c_char_p),  # the op, and its source's name where it has several
        ("parameter_bytes", ctypes.c_size_t),
    )


_Find = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(Kernel),
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_size_t,
)


_Enter = ctypes.CFUNCTYPE(None, ctypes.c_int)
_Asked = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)


class _Connection(ctypes.Structure):
    """As ``apex::RtcConnection`` has it."""

    _fields_ = (
        ("find", _Find),
        ("launch", ctypes.c_void_p),
        ("describe", ctypes.c_void_p),
        ("enter", _Enter),
        ("launch_as", ctypes.c_void_p),
        ("takes_dependent_launches", _Asked),
        ("takes_long_parameters", _Asked),
        ("takes_clusters", _Asked),
        ("set_attribute", ctypes.c_void_p),
        ("current_stream", CurrentStream),
        ("is_hip", ctypes.c_int),
    )


def expression(mangled: str) -> str:
    """The C++ expression that names a kernel, such as ``apex::gpu::rowwise_kernel<...>``.

    Args:
        mangled: the name of the type that has the kernel as its argument.

    Raises:
        BuildError: it has no name that another program can use.
    """
    standard = ctypes.CDLL("libstdc++.so.6")
    standard.__cxa_demangle.restype = ctypes.c_void_p
    address = standard.__cxa_demangle(mangled.removeprefix("*").encode(), None, None, None)
    text = ctypes.string_at(address).decode() if address else ""
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
    whole = re.fullmatch(r"apex::KernelOf<\(?&\(?(?:void )?(.*?)\)*>\*", text)
    if whole is None or "(anonymous namespace)" in text or "{lambda" in text:
        raise BuildError(
            f"the kernel {text or mangled} cannot be named outside of its source: kernels and what "
            "they are made of must not be in an anonymous namespace nor be lambdas."
        )
    depth = 0
    for at, letter in enumerate(whole[1]):  # up to the list of parameters
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return whole[1][:at]
    return whole[1]


@functools.cache
def _headers(source: Path) -> tuple[list[Path], bytes]:
    """What of a source's includes kernels are made of, and a digest of all that these include."""
    headers = without_torch(source)
    state = hashlib.sha256()
    files = {STANDARD, *headers}.union(*map(included, headers))
    for name, text in sorted((file.name, file.read_bytes()) for file in files):
        state.update(name.encode() + b"\0" + text)
    return headers, state.digest()


def compiled(
    compiler: RuntimeCompiler, kernel: Kernel, architecture: str, op_folders: dict[str, Path]
) -> tuple[str, str, bytes]:
    """A kernel for an architecture, from the cache or compiled.

    Args:
        compiler: NVRTC or HIPRTC.
        kernel: as the library lists it.
        architecture: such as ``sm_90`` or ``gfx942``.
        op_folders: of each op that the library has, by name.

    Returns:
        Its name in the cache, where it may not lie; its symbol; and the machine code, or PTX.

    Raises:
        BuildError: it does not compile.
    """
    unit, name = kernel.unit.decode(), expression(kernel.name.decode())
    state = hashlib.sha256(_headers(_source_of(unit, op_folders))[1])
    given = (compiler.options, compiler.first_line, name, kernel.parameter_bytes)
    state.update(repr(given).encode())
    kind = f"{compiler.prefix}-{compiler}-{architecture}"
    key = f"{kind}/{unit}-{state.hexdigest()[:32]}.kernel"
    with _lock:
        root = _cache()
        kept = root and _kept(root / key)
        if kept is None:
            if jit.is_forbidden():
                raise BuildError(
                    f"APEX_JIT=0 forbids compiling {name} for {architecture}, and it is not in the "
                    f"cache {root}. Unset APEX_JIT, or fill the cache before: "
                    f"`python -m apex.<package> --compile {architecture}`."
                )
            _say(kind, root)
            name, text, options = program(kernel, op_folders, architecture, compiler)
            symbol, image, _ = compiler.compile(text, name, options)
            kept = symbol, image
            if root:
                _keep(root / key, *kept)
    return (key, *kept)


_lock = threading.RLock()
_count = 0
_unusable: set[str] = set()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()  # its holder may have been a thread that a child does not have


os.register_at_fork(after_in_child=_renew_lock)


def _say(kind: str, root: Path | None) -> None:
    global _count
    _count += 1
    if _count == 1:
        where = f"kept in {root}" if root else "not kept"
        text = (
            "apex: compiling GPU kernels by %s at their first calls, 0.1 to 2 s each; they are %s."
        )
        logger.warning(text, kind, where)
    elif _count in _MANY:
        logger.warning("apex: %d GPU kernels were compiled by this process.", _count)


def _cache() -> Path | None:
    """The cache's folder, which need not be there; None where there can be none that is trusted."""
    try:
        root = jit.cache_folder()
        trust.check_above(root)
        if root.exists():
            trust.check_trusted(root)
    except (OSError, BuildError) as error:
        _warn(error)
        return None
    return root


def _kept(file: Path) -> tuple[str, bytes] | None:
    """Symbol and code of a kernel in the cache; None if it is not there, damaged or not trusted."""
    try:
        checked = trust.open_checked(file)
    except (OSError, BuildError) as error:
        _warn(error)
        return None
    if checked is None:
        return None
    with open(checked.descriptor, "rb", closefd=False) as opened:
        opened.seek(0)
        symbol, _, image = opened.read().partition(b"\0")
    return symbol.decode(), image


def _keep(file: Path, symbol: str, image: bytes) -> None:
    """Write a kernel into the cache, whole or not at all."""
    folder = file.parent
    try:
        trust.make_trusted(folder.parent)
        trust.make_private_folder(folder)
        for left in folder.glob(f"{_UNFINISHED}*"):
            if time.time() - left.stat().st_mtime > _LONG_AGO_S:  # its process was killed
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder) as work:
            written = Path(work, "kernel")
            written.write_bytes(symbol.encode() + b"\0" + image)
            written.chmod(trust.PRIVATE)
            seal = Path(work, "seal")
            seal.write_text(trust.seal(written))
            # What lies without its own seal is not loaded, so the order does not matter.
            os.replace(seal, trust.seal_path(file))
            os.replace(written, file)
    except (OSError, BuildError) as error:
        _warn(error)


def _warn(error: Exception) -> None:
    """Say once that kernels are not kept: they run all the same."""
    text = str(error)
    if text not in _unusable:
        _unusable.add(text)
        logger.warning(
            "apex: compiled GPU kernels cannot be kept, so each process compiles them anew: %s. "
            "APEX_CACHE_DIR names another folder.",
            text.removesuffix("."),
        )


def listed(library: ctypes.CDLL) -> list[Kernel]:
    """The kernels that an open library may launch."""
    kernels = ctypes.POINTER(Kernel)()
    library.apex_rtc_kernels.restype = ctypes.c_size_t
    count = library.apex_rtc_kernels(ctypes.byref(kernels))
    return kernels[:count]


def program(
    kernel: Kernel, op_folders: dict[str, Path], architecture: str, compiler: RuntimeCompiler
) -> tuple[str, str, list[str]]:
    """What a compiler is given for a kernel: its name, the program, and options.

    Raises:
        BuildError: the kernel cannot be named.
    """
    name = expression(kernel.name.decode())
    headers, _ = _headers(_source_of(kernel.unit.decode(), op_folders))
    lines = [compiler.first_line, *(f'#include "{header}"\n' for header in headers)]
    lines.append(_PARAMETERS.format(name=name, bytes=kernel.parameter_bytes))
    options = [f"{compiler.architecture_option}={architecture}", f"-I{toolchain.INCLUDE}"]
    return name, "".join(lines), options


def _source_of(unit: str, op_folders: dict[str, Path]) -> Path:
    """The source of a unit: of ``fused_adam`` is ``fused_adam.cpp``, of ``fused_adam.x`` x.cpp."""
    return op_folders[unit.partition(".")[0]] / f"{unit.rpartition('.')[2]}.cpp"


_connections: list[Any] = []  # what C++ calls must not be collected
_loaded: dict[tuple[str, int | None], int] = {}


def connect(library: ctypes.CDLL, op_folders: dict[str, Path]) -> None:
    """Let an open library launch: give it the kernels that it asks for, and the driver.

    Args:
        library: for ``gpu-rtc``.
        op_folders: of each of its ops, by name.
    """

    import torch

    kept: list[Any] = []

    def find(kernel: Any, device: int, found: Any, problem: Any, size: int) -> int:
        try:
            found[0] = _load(kernel.contents, device, op_folders)
            with _lock:
                if not kept:
                    kept.extend(driver().functions())
                    for name, function in zip(LAUNCHING, kept, strict=True):
                        setattr(connection, name, ctypes.cast(function, ctypes.c_void_p))
            return 0
        except BaseException as error:  # C++ raises it
            text = f"{kernel.contents.unit.decode()}: {error}".encode()[: size - 1]
            ctypes.memmove(problem, text + b"\0", len(text) + 1)
            return 1

    connection = _Connection(
        find=_Find(find),
        enter=_Enter(lambda device: driver().enter(device)),
        takes_dependent_launches=_Asked(takes_dependent_launches),
        takes_long_parameters=_Asked(takes_long_parameters),
        takes_clusters=_Asked(takes_clusters),
        current_stream=current_stream(),
        is_hip=torch.version.hip is not None,
    )
    _connections.append((connection, kept))
    library.apex_rtc_connect(ctypes.byref(connection))


def takes_long_parameters(device: int) -> bool:
    """Whether a kernel may have 32,764 bytes of parameters there instead of 4 KiB.

    Compiler, driver and card decide: from CUDA 12.1 and compute capability 7.0 on.
    """
    return _has(device, 12010, (7, 0))


def takes_dependent_launches(device: int) -> bool:
    """Whether a kernel may be launched before the one in front of it has ended, in graphs too.

    That is from CUDA 12.3 and compute capability 9.0 on.
    """
    return _has(device, 12030, (9, 0))


def takes_clusters(device: int) -> bool:
    """Whether blocks may be launched in clusters, which share their memory.

    That is from CUDA 11.8 and compute capability 9.0 on.
    """
    return _has(device, 11080, (9, 0))


def _has(device: int, cuda: int, capability: tuple[int, int]) -> bool:
    import torch

    if torch.version.hip:
        return False
    try:
        major, minor, *_ = compiler().version
        known = min(driver().version(), 1000 * major + 10 * minor)
        return known >= cuda and torch.cuda.get_device_capability(device) >= capability
    except BuildError:  # what is wrong is told where a kernel is asked for
        return False


def _load(kernel: Kernel, device: int, op_folders: dict[str, Path]) -> int:
    """A kernel of the driver for a device, compiled and loaded if need be."""
    architecture = compiler().architecture_of(device)
    with _lock:
        key, symbol, image = compiled(compiler(), kernel, architecture, op_folders)
        owner = device if driver().loads_for_one_device else None
        if (key, owner) not in _loaded:
            driver().enter(device)
            _loaded[key, owner] = driver().load(symbol, image)
        return _loaded[key, owner]
