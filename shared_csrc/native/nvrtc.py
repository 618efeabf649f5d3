"""NVRTC, NVIDIA's compiler as a library, which every torch for CUDA brings.

Nothing here needs a GPU. :mod:`.rtc` decides what is compiled, for which card, and keeps it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import toolchain
from .errors import BuildError

# Headers that NVRTC does not have; each is apex/rtc/standard.h.
STANDARD_HEADERS = (
    "algorithm",
    "cmath",
    "concepts",
    "cstddef",
    "cstdint",
    "cstring",
    "cuda_fp16.h",
)
STANDARD_HEADERS += ("limits", "type_traits", "utility", "vector")
OPTIONS = ("--std=c++20", "-default-device")
_LIBRARY = re.compile(r"libnvrtc(?:-[0-9a-f]+)?\.so\.(\d+)(?:\.[\d.]+)?")
_SUCCESS = 0


class Nvrtc:
    """One libnvrtc.

    Args:
        path: of the library, or its name, where the loader finds it.

    Raises:
        BuildError: it cannot be loaded.

    Attributes:
        version: such as ``(13, 0)``.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        try:
            # 13.0 looks for its builtins wherever the loader looks, and not beside itself.
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))
            self._library = ctypes.CDLL(self.path)
        except OSError as error:
            raise BuildError(f"NVRTC cannot be loaded: {error}.") from error
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    @functools.cached_property
    def architectures(self) -> tuple[int, ...]:
        """The compute capabilities that it compiles for, such as 90, in rising order."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return tuple(sorted(numbers))

    def architecture_for(self, capability: int) -> str:
        """What to compile for a card: its own machine code, or what its driver translates further.

        Args:
            capability: compute capability without its dot, such as 90.

        Raises:
            BuildError: the card is older than all that NVRTC compiles for.
        """
        if capability in self.architectures:
            return f"sm_{capability}"
        older = [number for number in self.architectures if number < capability]
        if not older:
            raise BuildError(
                f"NVRTC {self} compiles for compute capability {self.architectures[0]} and later, "
                f"and this card has {capability}. Install a torch for an older CUDA."
            )
        return f"compute_{older[-1]}"

    def __str__(self) -> str:
        return "{}.{}".format(*self.version)

    def compile(self, source: str, name: str, options: Sequence[str]) -> tuple[str, bytes, str]:
        """Compile the kernel of a program that an expression names.

        Args:
            source: the program, which includes the kernel's template.
            name: such as ``apex::cuda::rowwise_kernel<...>``.
            options: beside :data:`OPTIONS`; one is ``--gpu-architecture=``.

        Returns:
            The kernel's symbol, machine code (``sm_``) or PTX (``compute_``) with it, and what the
            compiler said.

        Raises:
            BuildError: it does not compile; with the compiler's words.
        """
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", *_program(program, source))
        try:
            self._call("nvrtcAddNameExpression", program, name.encode())
            words = [word.encode() for word in (*OPTIONS, *options)]
            given = (ctypes.c_char_p * len(words))(*words)
            status = self._library.nvrtcCompileProgram(program, len(words), given)
            said = self._text("ProgramLog", program).decode(errors="replace")
            if status != _SUCCESS:
                raise BuildError(
                    f"NVRTC {self} did not compile {name}: {self._error(status)}\n{said[:2000]}"
                )
            symbol = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(symbol))
            is_ptx = any("architecture=compute_" in word for word in options)
            image = self._text("PTX" if is_ptx else "CUBIN", program)
            return (symbol.value or b"").decode(), image, said
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, kind: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{kind}", program, buffer)
        return buffer.raw if kind != "ProgramLog" else buffer.value

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != _SUCCESS:
            raise BuildError(f"{self.path}: {function} failed: {self._error(status)}.")

    def _error(self, status: int) -> str:
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return self._library.nvrtcGetErrorString(status).decode()


def _program(program: ctypes.c_void_p, source: str) -> tuple[object, ...]:
    count = len(STANDARD_HEADERS)
    texts = (ctypes.c_char_p * count)(*[b'#include "apex/rtc/standard.h"'] * count)
    names = (ctypes.c_char_p * count)(*map(str.encode, STANDARD_HEADERS))
    return ctypes.byref(program), source.encode(), b"apex_kernel.cu", count, texts, names


def libraries(major: int | None = None) -> list[Path]:
    """The files of libnvrtc that come with torch, or with packages beside it; newest last.

    Args:
        major: of CUDA; None for any.
    """
    found: dict[Path, int] = {}
    for folder in _folders():
        for file in sorted(folder.glob("libnvrtc*.so.*")):
            named = _LIBRARY.fullmatch(file.name)
            if named and major in (None, int(named[1])):
                found.setdefault(file.resolve(), int(named[1]))
    return sorted(found, key=lambda file: found[file])


def _folders() -> Iterator[Path]:
    """Where torch's wheels, and those of CUDA, have their libraries."""
    yield toolchain.torch_root() / "lib"
    nvidia = importlib.util.find_spec("nvidia")
    for root in (nvidia and nvidia.submodule_search_locations) or ():
        yield from sorted(Path(root).glob("*/lib"))


@functools.cache
def nvrtc() -> Nvrtc:
    """The libnvrtc of the CUDA that torch is built for: its wheel's, else the system's.

    Raises:
        BuildError: there is none.
    """
    import torch

    version = torch.version.cuda
    if version is None:
        raise BuildError(f"torch {torch.__version__} is not built for CUDA, and brings no NVRTC.")
    major = int(version.partition(".")[0])
    known = libraries(major)
    try:
        return Nvrtc(known[-1] if known else f"libnvrtc.so.{major}")
    except BuildError as error:
        if known:
            raise
        raise BuildError(
            f"libnvrtc.so.{major}, which compiles GPU kernels, was not found beside torch "
            f"{torch.__version__} nor by the loader. Install it: pip install "
            + ("nvidia-cuda-nvrtc" if major >= 13 else f"nvidia-cuda-nvrtc-cu{major}")
        ) from error
