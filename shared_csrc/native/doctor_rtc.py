"""What the doctor says and does about kernels that NVRTC compiles."""

from __future__ import annotations

import os
import sys

import torch

from . import jit, nvrtc, rtc, targets, toolchain
from .errors import BuildError
from .library import OpLibrary


def compiler() -> str:
    """The version and file of the compiler that torch brings for GPUs, or why there is none."""
    try:
        found = nvrtc.nvrtc()
    except BuildError as error:
        return str(error).removesuffix(".")
    return f"{found.path} ({found}, for {', '.join(f'sm_{n}' for n in found.architectures)})"


def on_nvidia_gpus(library: OpLibrary) -> str | None:
    """What serves NVIDIA GPUs, whether there is one or not; None where torch is for others."""
    if not torch.version.cuda:
        return None
    entries = [
        (e["file"], e["archs"])
        for e in library.manifest().get("libraries", [])
        if e["backend"] in ("cuda", toolchain.RTC)
    ]
    brought = [f"{file} for {', '.join(archs) or 'all'}" for file, archs in entries]
    how = " and ".join(brought) or "an op's host code is compiled at its first call"
    try:
        count = len(list(jit.cache_folder().glob("nvrtc-*/*.kernel")))
    except BuildError:
        count = 0
    return f"{how}; {count} kernels of NVRTC in the cache; {_driver()}"


def _driver() -> str:
    try:
        major, rest = divmod(rtc.driver().version(), 1000)
    except BuildError as error:
        return str(error).removesuffix(".")
    return f"libcuda.so.1 of CUDA {major}.{rest // 10}"


def listed_for_cuda() -> tuple[str, ...]:
    """What ``TORCH_CUDA_ARCH_LIST`` names; nothing where that is ``native``."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    return targets.cuda_arch_list("" if listed == "native" else listed)


def architectures() -> list[str]:
    """The NVIDIA GPUs whose kernels NVRTC compiles for ``--build``."""
    if not torch.version.cuda or jit.backend_of("cuda") != toolchain.RTC:
        return []
    archs = [arch for arch in listed_for_cuda() if arch.startswith("sm_")]
    if torch.cuda.is_available():
        archs.append("sm_{}{}".format(*torch.cuda.get_device_capability()))
    return list(dict.fromkeys(archs))


def compile_kernels(library: OpLibrary, architectures: list[str]) -> None:
    """Compile into the cache every kernel that a package may launch on these GPUs.

    Raises:
        BuildError: there is no NVRTC, it does not know one of them, or something does not compile.
    """
    compiler = nvrtc.nvrtc()
    known = [f"sm_{number}" for number in compiler.architectures]
    for arch in architectures:
        if arch not in known:
            text = f"expected some of {', '.join(known)}, which NVRTC {compiler} knows"
            raise BuildError(f"{text}, got {arch}.")
    for opened in library.open_for_rtc():
        kernels = rtc.listed(opened)
        for arch in architectures:
            for number, kernel in enumerate(kernels, start=1):
                rtc.compiled(compiler, kernel, arch, library.op_folders)
                if number % 20 == 0 or number == len(kernels):
                    print(f"{arch}: {number} of {len(kernels)} kernels", file=sys.stderr)
