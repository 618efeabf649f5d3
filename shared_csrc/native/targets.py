"""Build targets: a backend with an ISA level (CPU) or a list of architectures (GPU)."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from pathlib import Path

# Features that a CPU must have for each level, as the kernel names them in /proc/cpuinfo. They
# are the x86-64 psABI levels; "abm" is lzcnt.
_V3_FEATURES = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4_FEATURES = _V3_FEATURES | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

# Best first. Other machines (arm64 has NEON in its baseline) know only "baseline".
X86_LEVELS = ("x86-64-v4", "x86-64-v3", "baseline")

# What a wheel is built for unless TORCH_CUDA_ARCH_LIST or PYTORCH_ROCM_ARCH says otherwise.
DEFAULT_CUDA_ARCH_LIST = "8.0;9.0;10.0;12.0+PTX"
DEFAULT_ROCM_ARCHS = "gfx90a;gfx942;gfx950;gfx1030;gfx1100;gfx1201"

# Names that torch takes in TORCH_CUDA_ARCH_LIST, too.
_CUDA_NAMES = {
    "Kepler": "3.5+PTX",
    "Kepler+Tesla": "3.7",
    "Maxwell": "5.0;5.2+PTX",
    "Maxwell+Tegra": "5.3",
    "Pascal": "6.0;6.1+PTX",
    "Volta": "7.0+PTX",
    "Volta+Tegra": "7.2",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ampere+Tegra": "8.7",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
    "Blackwell+Tegra": "11.0",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """What a kernel library is compiled for.

    Args:
        backend: ``"cpu"``, ``"cuda"`` (by nvcc), ``"gpu-rtc"`` (the host's half; :mod:`.rtc`
            compiles kernels), ``"hip"``, or ``"emu"``: GPU kernels on the host, for tests.
        level: ISA level of a CPU library, ``"baseline"`` on a GPU.
        archs: GPU architectures such as ``("sm_90", "sm_100")`` or ``("gfx90a",)``.
    """

    backend: str
    level: str = "baseline"
    archs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file name stem of this target's library, such as ``cpu-x86-64-v3``."""
        return f"cpu-{self.level}" if self.backend == "cpu" else self.backend


def is_emulating() -> bool:
    """Whether ``APEX_EMULATE`` asks for GPU kernels, emulated on the host, for CPU tensors.

    It gives the number of lanes of a warp, 32 or 64. A tool for tests, in a checkout only.
    """
    lanes = os.environ.get("APEX_EMULATE", "")
    if lanes not in ("", "32", "64"):
        raise ValueError(f"APEX_EMULATE must be 32 or 64 (lanes of a warp), got {lanes!r}.")
    return lanes != ""


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def cpu_levels() -> tuple[str, ...]:
    """Every ISA level that kernels are built for on this kind of machine, best first."""
    return X86_LEVELS if is_x86() else ("baseline",)


@functools.cache
def _cpu_features() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()  # not Linux: baseline is right everywhere
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def supported_cpu_levels() -> tuple[str, ...]:
    """The ISA levels that this CPU can run, best first.

    ``APEX_CPU_LEVEL`` lowers the choice, for tests and to compare levels.
    """
    features = _cpu_features()
    needs = {"x86-64-v4": _V4_FEATURES, "x86-64-v3": _V3_FEATURES, "baseline": frozenset()}
    levels = tuple(level for level in cpu_levels() if needs[level] <= features)
    wanted = os.environ.get("APEX_CPU_LEVEL", "")
    if not wanted:
        return levels
    if wanted not in levels:
        raise ValueError(
            f"APEX_CPU_LEVEL is {wanted!r}, but this CPU supports {', '.join(levels)}."
        )
    return levels[levels.index(wanted) :]


def cuda_arch_list(value: str) -> tuple[str, ...]:
    """``TORCH_CUDA_ARCH_LIST`` ("8.0;9.0+PTX" or "8.0 9.0") as ("sm_80", "sm_90", "compute_90").

    "Hopper" and torch's other names stand for the numbers that torch gives them.
    """
    archs: list[str] = []
    named = value.replace(";", " ").split()
    for item in [i for name in named for i in _CUDA_NAMES.get(name, name).split(";")]:
        number = item.removesuffix("+PTX").replace(".", "")
        if not number.rstrip("af").isdigit():
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST: expected entries like 9.0, 9.0+PTX or Hopper, got {item!r}."
            )
        archs.append(f"sm_{number}")
        if item.endswith("+PTX"):
            archs.append(f"compute_{number}")
    return tuple(dict.fromkeys(archs))


def runs_on(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code for ``archs`` runs on a CUDA device of this compute capability.

    Machine code runs within its major version on the same or a later minor; PTX runs on anything
    later. Architecture-specific code ("sm_90a") runs only on exactly its own.
    """
    major, minor = capability
    for arch in archs:
        kind, _, number = arch.partition("_")
        specific = not number.isdigit()
        digits = number.rstrip("af")
        arch_major, arch_minor = int(digits[:-1]), int(digits[-1])
        if specific:
            if (arch_major, arch_minor) == capability:
                return True
        elif kind == "compute":
            if (arch_major, arch_minor) <= capability:
                return True
        elif arch_major == major and arch_minor <= minor:
            return True
    return False
