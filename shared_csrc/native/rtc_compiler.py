"""A compiler of GPU kernels as a library: what NVRTC and HIPRTC have in common."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from .errors import BuildError

# Headers that they do not have; each is apex/rtc/standard.h.
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
_SUCCESS = 0


class RuntimeCompiler(ABC):
    """One such library, open.

    Args:
        path: of the library, or its name, where the loader finds it.

    Raises:
        BuildError: it cannot be loaded.

    Attributes:
        version: such as ``(13, 0)``.
    """

    title: ClassVar[str]  # in messages
    prefix: ClassVar[str]  # of the names of its functions
    options: ClassVar[tuple[str, ...]]  # of every kernel
    architecture_option: ClassVar[str]
    first_line: ClassVar[str] = ""  # of every program
    version: tuple[int, ...]

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        try:
            self._library = self._open()
        except OSError as error:
            raise BuildError(f"{self.title} cannot be loaded: {error}.") from error
        self.version = self._version()

    def _open(self) -> ctypes.CDLL:
        return ctypes.CDLL(self.path)

    @abstractmethod
    def _version(self) -> tuple[int, ...]:
        """The library's, or its toolkit's."""

    @abstractmethod
    def architecture_of(self, device: int) -> str:
        """What to compile for a device of torch's, such as ``sm_90`` or ``gfx942``.

        Raises:
            BuildError: it is older than all that is compiled for.
        """

    @abstractmethod
    def serves(self) -> str:
        """What it compiles for, in words."""

    @abstractmethod
    def check_architecture(self, architecture: str) -> None:
        """Raise BuildError where it does not compile for an architecture."""

    def __str__(self) -> str:
        return ".".join(map(str, self.version))

    def compile(self, source: str, name: str, options: Sequence[str]) -> tuple[str, bytes, str]:
        """Compile the kernel of a program that an expression names.

        Args:
            source: the program, which includes the kernel's template.
            name: such as ``apex::gpu::rowwise_kernel<...>``.
            options: beside :attr:`options`; one has the architecture.

        Returns:
            The kernel's symbol, machine code (PTX where the architecture is one for that) with it,
            and what the compiler said.

        Raises:
            BuildError: it does not compile; with the compiler's words.
        """
        program = ctypes.c_void_p()
        self._call("CreateProgram", *_program(program, source))
        try:
            self._call("AddNameExpression", program, name.encode())
            words = [word.encode() for word in (*self.options, *options)]
            given = (ctypes.c_char_p * len(words))(*words)
            status = self._function("CompileProgram")(program, len(words), given)
            said = self._text("ProgramLog", program).partition(b"\0")[0].decode(errors="replace")
            if status != _SUCCESS:
                raise BuildError(
                    f"{self.title} {self} did not compile {name}: {self._error(status)}\n"
                    f"{said[:2000]}"
                )
            symbol = ctypes.c_char_p()
            self._call("GetLoweredName", program, name.encode(), ctypes.byref(symbol))
            image = self._text(self._kind_of_image(options), program)
            return (symbol.value or b"").decode(), image, said
        finally:
            self._function("DestroyProgram")(ctypes.byref(program))

    @abstractmethod
    def _kind_of_image(self, options: Sequence[str]) -> str:
        """What the functions that give the compiled kernel are called by."""

    def _text(self, kind: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{kind}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{kind}", program, buffer)
        return buffer.raw

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"{self.prefix}{name}")

    def _call(self, name: str, *arguments: object) -> None:
        status = self._function(name)(*arguments)
        if status != _SUCCESS:
            raise BuildError(f"{self.path}: {self.prefix}{name} failed: {self._error(status)}.")

    def _error(self, status: int) -> str:
        told = self._function("GetErrorString")
        told.restype = ctypes.c_char_p
        return told(status).decode()


def _program(program: ctypes.c_void_p, source: str) -> tuple[object, ...]:
    count = len(STANDARD_HEADERS)
    texts = (ctypes.c_char_p * count)(*[b'#include "apex/rtc/standard.h"'] * count)
    names = (ctypes.c_char_p * count)(*map(str.encode, STANDARD_HEADERS))
    return ctypes.byref(program), source.encode(), b"apex_kernel.cu", count, texts, names
