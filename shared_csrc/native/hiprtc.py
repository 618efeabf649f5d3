"""HIPRTC, AMD's compiler as a library, which every torch for ROCm brings or finds.

Nothing here needs a GPU. :mod:`.rtc` decides what is compiled, for which card, and keeps it.
Source: https://rocm.docs.amd.com/projects/HIP (HIP RTC).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from . import toolchain
from .errors import BuildError
from .rtc_compiler import RuntimeCompiler

_ARCHITECTURE = re.compile(r"gfx[0-9a-f]{3,5}")  # of a card; code for it suits all its features


class Hiprtc(RuntimeCompiler):
    """One libhiprtc, or a libamdhip64 that has its functions, as in some ROCm 5."""

    title, prefix = "HIPRTC", "hiprtc"
    options = ("-std=c++20", "-O3")
    architecture_option = "--offload-arch"
    # Parts of the host's half are read, too, and name types that are of the device alone here.
    first_line = "#pragma clang force_cuda_host_device begin\n"

    def _version(self) -> tuple[int, ...]:
        """That of its ROCm: hiprtcVersion says 9.0 in all of them."""
        if not hasattr(self._library, "hiprtcCompileProgram"):
            raise BuildError(f"{self.path} is not HIPRTC: it has no hiprtcCompileProgram.")
        number = ctypes.c_int()
        runtime = ctypes.CDLL(runtime_beside(self.path))
        status = runtime.hipRuntimeGetVersion(ctypes.byref(number))
        if status != 0:
            raise BuildError(f"{self.path}: hipRuntimeGetVersion failed with {status}.")
        major, rest = divmod(number.value, 10_000_000)
        return (major, *divmod(rest, 100_000))

    def architecture_of(self, device: int) -> str:
        import torch

        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]

    def serves(self) -> str:
        return f"the GPUs of ROCm {self.version[0]}"

    def check_architecture(self, architecture: str) -> None:
        if not _ARCHITECTURE.fullmatch(architecture):
            text = "expected AMD GPUs such as gfx90a or gfx1100, since this torch is for ROCm"
            raise BuildError(f"{text}, got {architecture}.")

    def _kind_of_image(self, options: Sequence[str]) -> str:
        return "Code"


def runtime_beside(compiler: str) -> str:
    """The file of HIP's runtime library that belongs to a libhiprtc, or its name for the loader."""
    path = Path(compiler)
    if path.name.startswith("libamdhip64"):
        return compiler
    beside = path.with_name(path.name.replace("libhiprtc", "libamdhip64"))
    return str(beside) if beside.is_file() else beside.name


def names_of(stem: str) -> Iterator[str]:
    """Files and names under which a library of torch's ROCm may be, best first.

    Args:
        stem: such as ``libhiprtc``.
    """
    import torch

    bundled = toolchain.torch_root() / "lib"
    yield from (str(file) for file in sorted(bundled.glob(f"{stem}.so*")))
    major = (torch.version.hip or "").partition(".")[0]
    home = os.environ.get("ROCM_HOME") or os.environ.get("ROCM_PATH")
    for name in (f"{stem}.so.{major}", f"{stem}.so"):
        yield name
        if home:
            yield str(Path(home, "lib", name))


@functools.cache
def hiprtc() -> Hiprtc:
    """The libhiprtc of the ROCm that torch is built for: its wheel's, else the system's.

    Raises:
        BuildError: there is none.
    """
    import torch

    major = (torch.version.hip or "").partition(".")[0]
    # Until ROCm 5 some distributions have its functions in the runtime's library.
    found, problems = find((*names_of("libhiprtc"), *names_of("libamdhip64")), major)
    if found is None:
        raise BuildError(
            f"libhiprtc.so of ROCm {major}, which compiles GPU kernels, was not found beside torch "
            f"{torch.__version__}, by the loader or in ROCM_HOME. Install ROCm's hiprtc, or set "
            "ROCM_HOME to the folder of ROCm; APEX_HIP_COMPILER=hipcc takes hipcc instead. What "
            f"was tried: {' '.join(problems)}"
        )
    return found


def find(names: Iterable[str], major: str = "") -> tuple[Hiprtc | None, list[str]]:
    """The first of some files, or names for the loader, that is HIPRTC; and what others are.

    Args:
        major: the first number of its version; "" for any.
    """
    problems = []
    for name in names:
        try:
            found = Hiprtc(name)
        except (BuildError, OSError) as error:
            problems.append(str(error))
            continue
        if major in ("", str(found.version[0])):
            return found, problems
        problems.append(f"{name} is of ROCm {found}.")
    return None, problems
