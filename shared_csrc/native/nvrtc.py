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
from .rtc_compiler import RuntimeCompiler

_LIBRARY = re.compile(r"libnvrtc(?:-[0-9a-f]+)?\.so\.(\d+)(?:\.[\d.]+)?")


class Nvrtc(RuntimeCompiler):
    """One libnvrtc; see the base class."""

    title, prefix = "NVRTC", "nvrtc"
    options = ("--std=c++20", "-default-device")
    architecture_option = "--gpu-architecture"

    def _open(self) -> ctypes.CDLL:
        # 13.0 looks for its builtins wherever the loader looks, and not beside itself.
        for builtins in sorted(Path(self.path).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))
        return super()._open()

    def _version(self) -> tuple[int, ...]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    @functools.cached_property
    def architectures(self) -> tuple[int, ...]:
        """The compute capabilities that it compiles for, such as 90, in rising order."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", numbers)
        return tuple(sorted(numbers))

    def architecture_of(self, device: int) -> str:
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        return self.architecture_for(10 * major + minor)

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

    def serves(self) -> str:
        return ", ".join(f"sm_{number}" for number in self.architectures)

    def check_architecture(self, architecture: str) -> None:
        known = [f"{kind}_{n}" for n in self.architectures for kind in ("sm", "compute")]
        if architecture not in known:
            text = f"expected some of {self.serves()}, which NVRTC {self} knows"
            raise BuildError(f"{text}, got {architecture}.")

    def _kind_of_image(self, options: Sequence[str]) -> str:
        return "PTX" if any("architecture=compute_" in word for word in options) else "CUBIN"


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
