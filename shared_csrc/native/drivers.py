"""What loads and launches kernels that are compiled at run time: libraries of GPUs' drivers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from .errors import BuildError
from .hiprtc import hiprtc, names_of
from .nvrtc import nvrtc
from .rtc_compiler import RuntimeCompiler

# What a driver gives to apex::RtcConnection.
LAUNCHING = ("launch", "launch_as", "describe", "set_attribute")
Function = Any  # of C
_Describe = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
_SetAttribute = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int
)
CurrentStream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Driver(ABC):
    """A driver's library, which torch has started.

    Raises:
        BuildError: there is none.
    """

    title: ClassVar[str]  # in messages
    prefix: ClassVar[str]  # of the names of its functions
    loads_for_one_device: ClassVar[bool]  # a kernel, rather than for all that it suits
    _RELAXED: ClassVar[int] = 2  # of a thread that captures a graph: what it loads is no part of it

    def __init__(self) -> None:
        self._library = self._open()

    @abstractmethod
    def _open(self) -> ctypes.CDLL:
        """Find the library."""

    @abstractmethod
    def functions(self) -> tuple[Function, ...]:
        """Functions of C, in the order of :data:`LAUNCHING`, with the arguments of CUDA's."""

    @abstractmethod
    def enter(self, device: int) -> None:
        """Make a device the calling thread's, where this has none."""

    def version(self) -> int:
        """The newest CUDA or ROCm that it knows, as its own number."""
        version = ctypes.c_int()
        self._call("DriverGetVersion", ctypes.byref(version))
        return version.value

    @abstractmethod
    def describe(self) -> str:
        """Its library and version, in words."""

    def load(self, symbol: str, image: bytes) -> int:
        """Load what was compiled; return the kernel."""
        with self._outside_of_graphs():
            return self._load(symbol, image)

    @abstractmethod
    def _load(self, symbol: str, image: bytes) -> int:
        """Load it, whatever the thread captures."""

    @contextlib.contextmanager
    def _outside_of_graphs(self) -> Iterator[None]:
        mode = ctypes.c_int(self._RELAXED)
        self._call("ThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("ThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _function(self, name: str) -> Function:
        return getattr(self._library, f"{self.prefix}{name}")

    def _call(self, name: str, *arguments: object) -> None:
        status = self._function(name)(*arguments)
        if status != 0:
            raise BuildError(
                f"{self.prefix}{name} of {self.title} failed with {status}: {self._text(status)}."
            )

    @abstractmethod
    def _text(self, status: int) -> str:
        """What an error is, in the driver's words."""


class CudaDriver(Driver):
    """libcuda."""

    title, prefix = "NVIDIA's driver", "cu"
    loads_for_one_device = False

    def _open(self) -> ctypes.CDLL:
        try:
            return ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise BuildError(f"{self.title} cannot be loaded: {error}.") from error

    def describe(self) -> str:
        major, rest = divmod(self.version(), 1000)
        return f"libcuda.so.1 of CUDA {major}.{rest // 10}"

    def functions(self) -> tuple[Function, ...]:
        names = "LaunchKernel", "LaunchKernelEx", "GetErrorString", "KernelSetAttribute"
        return tuple(map(self._function, names))

    def enter(self, device: int) -> None:
        """Make a device's context the calling thread's, where this has none.

        A thread has one after its first call of CUDA's runtime, and torch may need none for an op.
        """
        context = ctypes.c_void_p()
        self._call("CtxGetCurrent", ctypes.byref(context))
        if context.value is None:
            self._call("DevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("CtxSetCurrent", context)

    def _load(self, symbol: str, image: bytes) -> int:
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        none = (None, None, 0)
        self._call("LibraryLoadData", ctypes.byref(library), image, *none, *none)
        self._call("LibraryGetKernel", ctypes.byref(kernel), library, symbol.encode())
        return kernel.value or 0

    def _text(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or b"an unknown error").decode()


class HipDriver(Driver):
    """libamdhip64, HIP's runtime, which is the driver's interface too."""

    title, prefix = "AMD's runtime", "hip"
    loads_for_one_device = True
    _SHARED_BYTES, _INVALID_VALUE = 64 * 1024, 1  # of a block, on every card

    def _open(self) -> ctypes.CDLL:
        said = "no file"
        for name in names_of("libamdhip64"):
            try:
                return ctypes.CDLL(name)
            except OSError as error:
                said = str(error)
        raise BuildError(f"{self.title} cannot be loaded: {said}.")

    def describe(self) -> str:
        major, rest = divmod(self.version(), 10_000_000)
        return f"libamdhip64.so of ROCm {major}.{rest // 100_000}"

    def functions(self) -> tuple[Function, ...]:
        def describe(status: int, text: Any) -> int:
            text[0] = self._error_text()(status)
            return 0

        def set_attribute(attribute: int, value: int, kernel: int, device: int) -> int:
            # A kernel of a module has none, and may have all of its block's memory.
            return 0 if value <= self._SHARED_BYTES else self._INVALID_VALUE

        launch = self._function("ModuleLaunchKernel")
        return launch, None, _Describe(describe), _SetAttribute(set_attribute)

    def enter(self, device: int) -> None:
        self._call("SetDevice", device)

    def _load(self, symbol: str, image: bytes) -> int:
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("ModuleLoadData", ctypes.byref(module), image)
        self._call("ModuleGetFunction", ctypes.byref(kernel), module, symbol.encode())
        return kernel.value or 0

    def _error_text(self) -> Callable[[int], int]:
        self._library.hipGetLastError()  # else torch's next launch raises it again
        told = self._library.hipGetErrorString
        told.restype = ctypes.c_void_p
        return told

    def _text(self, status: int) -> str:
        return ctypes.string_at(self._error_text()(status)).decode()


# Started at the first launch: an image is made without one. Two threads may get one each, at first:
# both are the same library.
@functools.cache
def driver() -> Driver:
    """The driver of the GPUs that torch is built for."""
    return HipDriver() if torch.version.hip else CudaDriver()


def compiler() -> RuntimeCompiler:
    """The compiler of kernels for the GPUs that torch is built for.

    Raises:
        BuildError: there is none.
    """
    return hiprtc() if torch.version.hip else nvrtc()


def current_stream() -> CurrentStream:
    """The function of torch that gives a device's stream; a null pointer in a torch for CPUs."""
    name = "libtorch_hip.so" if torch.version.hip else "libtorch_cuda.so"
    try:
        return CurrentStream(("aoti_torch_get_current_cuda_stream", ctypes.CDLL(name)))
    except OSError:
        return CurrentStream()
