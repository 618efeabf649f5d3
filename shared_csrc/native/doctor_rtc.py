"""What the doctor says and does about kernels that NVRTC and HIPRTC compile."""

from __future__ import annotations

import os
import sys

import torch

from . import drivers, jit, rtc, targets, toolchain
from .errors import BuildError
from .library import OpLibrary


def compiler() -> str:
    """The version and file of the compiler that torch brings for GPUs, or why there is none."""
    try:
        found = drivers.compiler()
    except BuildError as error:
        return str(error).removesuffix(".")
    return f"{found.path} ({found}, for {found.serves()})"


def on_gpus(library: OpLibrary) -> str | None:
    """What serves the GPUs that torch is for, be there one or not; None if it is for none."""
    if not torch.version.cuda and not torch.version.hip:
        return None
    whole, kept = ("hip", "HIPRTC") if torch.version.hip else ("cuda", "NVRTC")
    entries = [
        (e["file"], e["archs"])
        for e in library.manifest().get("libraries", [])
        if e["backend"] in (whole, toolchain.RTC)
    ]
    brought = [f"{file} for {', '.join(archs) or 'all'}" for file, archs in entries]
    how = " and ".join(brought) or "an op's host code is compiled at its first call"
    try:
        count = len(list(jit.cache_folder().glob(f"{kept.lower()}-*/*.kernel")))
    except BuildError:
        count = 0
    return f"{how}; {count} kernels of {kept} in the cache; {_driver()}"


def _driver() -> str:
    try:
        return drivers.driver().describe()
    except BuildError as error:
        return str(error).removesuffix(".")


def listed_for_cuda() -> tuple[str, ...]:
    """What ``TORCH_CUDA_ARCH_LIST`` names; nothing where that is ``native``."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    return targets.cuda_arch_list("" if listed == "native" else listed)


def listed_for_rocm() -> tuple[str, ...]:
    """What ``PYTORCH_ROCM_ARCH`` names."""
    return tuple(os.environ.get("PYTORCH_ROCM_ARCH", "").replace(";", " ").split())


def architectures() -> list[str]:
    """The GPUs whose kernels are compiled one by one for ``--build``."""
    if not (torch.version.cuda or torch.version.hip) or jit.backend_of("cuda") != toolchain.RTC:
        return []
    if torch.version.hip:
        archs = [arch.partition(":")[0] for arch in listed_for_rocm()]
    else:
        archs = [arch for arch in listed_for_cuda() if arch.startswith("sm_")]
    if torch.cuda.is_available():
        archs.append(drivers.compiler().architecture_of(torch.cuda.current_device()))
    return list(dict.fromkeys(archs))


def compile_kernels(library: OpLibrary, architectures: list[str]) -> None:
    """Compile into the cache every kernel that a package may launch on these GPUs.

    Raises:
        BuildError: there is no compiler, it does not know one of them, or something does not
            compile.
    """
    compiler = drivers.compiler()
    for arch in architectures:
        compiler.check_architecture(arch)
    for opened in library.open_for_rtc():
        kernels = rtc.listed(opened)
        for arch in architectures:
            for number, kernel in enumerate(kernels, start=1):
                rtc.compiled(compiler, kernel, arch, library.op_folders)
                if number % 20 == 0 or number == len(kernels):
                    print(f"{arch}: {number} of {len(kernels)} kernels", file=sys.stderr)
