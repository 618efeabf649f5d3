"""Whether the engines' kernels load and store 128 bits at a time, seen in their machine code."""

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

from ci import ptxas

_FUNCTION = re.compile(r"^\s*Function : (\w+)$", re.MULTILINE)
# Global memory only, but for LD and ST, which may also mean shared memory that was staged. Local
# (LDL, STL) and shared (LDS, STS) accesses do not count.
_ACCESS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*(LDG?|STG?)(\.[\w.]+)", re.MULTILINE)

# Engines that move data in packs of 16 bytes a thread wherever a tensor's address allows.
PACKED_KERNELS = {
    "foreach_kernel": ("loads", "stores"),
    "foreach_reduce_chunks": ("loads",),  # what it stores is one sum a block
    "rowwise_kernel": ("loads", "stores"),
    "segment_heads": ("loads",),  # sums of float32, which lie as they come
    "segment_sums": ("loads", "stores"),
}


@dataclass(frozen=True)
class Accesses:
    """How many instructions of a kernel move 16 bytes, and how many move less."""

    kernel: str
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    narrow_stores: int


def of_library(library: Path, arch: str) -> list[dict]:
    """Disassemble a library, or object, and count the memory accesses of its kernels."""
    cuobjdump, environment = find_cuobjdump()
    command = [cuobjdump, "-sass", "-arch", arch, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode or "Function :" not in done.stdout:
        raise RuntimeError(f"{' '.join(command)} gave no machine code:\n{done.stderr[:2000]}")
    return [asdict(a) for a in parse(done.stdout)]


def find_cuobjdump() -> tuple[str, dict[str, str]]:
    """Return cuobjdump, and the environment in which it finds nvdisasm, which it calls."""
    folders = [Path(os.environ[v]) / "bin" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    if nvcc := shutil.which("nvcc"):
        folders.append(Path(nvcc).resolve().parent)
    folders += sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin"))
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    found = shutil.which("cuobjdump", path=path)
    if found is None or shutil.which("nvdisasm", path=path) is None:
        raise FileNotFoundError(
            "cuobjdump and nvdisasm were not found. They are part of the CUDA toolkit; without "
            "one: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    return found, os.environ | {"PATH": path}


def parse(text: str) -> list[Accesses]:
    """Read what `cuobjdump -sass` prints."""
    _, *parts = _FUNCTION.split(text)
    symbols, codes = parts[::2], parts[1::2]
    kernel_names = ptxas.short_names(symbols)
    return [
        Accesses(kernel_names[symbol], *_count(code))
        for symbol, code in zip(symbols, codes, strict=True)
    ]


def _count(code: str) -> tuple[int, int, int, int]:
    """Return wide loads, narrow loads, wide stores, narrow stores."""
    counts = {(kind, wide): 0 for kind in ("LD", "ST") for wide in (True, False)}
    for name, suffixes in _ACCESS.findall(code):
        counts[name[:2], "128" in suffixes.split(".")] += 1
    return tuple(counts.values())


def narrow_kernels(op: str, kernels: list[dict], accepted: list[dict]) -> list[str]:
    """Return a complaint for each engine kernel without 16-byte accesses that was not accepted."""
    complaints = []
    for kernel in kernels:
        name = kernel["kernel"]
        allowed = {a["what"] for a in accepted if ptxas.names(a, op, name)}
        for what in PACKED_KERNELS.get(name.partition("<")[0], ()):
            missing = kernel[f"wide_{what}"] == 0 and kernel[f"narrow_{what}"] > 0
            if missing and what not in allowed:
                complaints.append(
                    f"{op}: {name} has no 128-bit {what}. Keep packs aligned and whole, or accept "
                    "it by name with a reason in ci/accepted_kernels.toml"
                )
    return complaints
