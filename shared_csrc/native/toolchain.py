"""Finds compilers and gives the command lines that compile and link for a target."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from .errors import BuildError
from .targets import Target

INCLUDE = Path(__file__).resolve().parent.parent / "include"

# Kernels use LibTorch's stable ABI as of torch 2.10, and so run on every later torch.
TORCH_TARGET_VERSION = "0x020a000000000000"

_COMMON = ("-std=c++20", "-O3", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}")
# Never -ffast-math: inf and nan must propagate. These two only drop errno and FP exceptions flags.
_CPU_FLAGS = ("-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math")
# The emulated GPU is told of every access and every undefined operation; see its documentation.
EMULATION = INCLUDE.parent / "emulation"
_EMULATED_FLAGS = (
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "-fsanitize=signed-integer-overflow,integer-divide-by-zero,shift,bounds,alignment,bool,enum,"
    "float-cast-overflow,unreachable,return,vla-bound",
)
# Calls that go to the emulator first, with which it learns of an op's tensors and of long copies.
_WRAPPED = (
    "memcpy",
    "memmove",
    "memset",
    "aoti_torch_get_data_ptr",
    "torch_get_mutable_data_ptr",
    "torch_get_const_data_ptr",
    "aoti_torch_aten_new_empty",
    "aoti_torch_empty_strided",
    "aoti_torch_new_tensor_handle",
    "aoti_torch_delete_tensor_object",
    "torch_call_dispatcher",
    "aoti_torch_call_dispatcher",
    "aoti_torch_copy_",
)

# What code for CUDA is translated from, unless its source asks for something newer.
_SHARED_PTX = 80
_PTX = re.compile(r"^#define APEX_PTX\b[ \t]*(.*?)[ \t]*(?://.*)?$", re.MULTILINE)

# The backend whose kernels are compiled at run time, see rtc.py: a library of the host's half.
RTC = "gpu-rtc"
_RTC_FLAGS = ("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-O2", "-ffunction-sections")

VERSION_TIMEOUT_S = 60


def torch_root() -> Path:
    """The installed torch's folder, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(
            "Kernels are compiled against torch's headers, and torch is not installed in this "
            "environment. Install torch 2.10 or later first; when building a wheel, use "
            "--no-build-isolation."
        )
    return Path(spec.origin).parent


def find_ninja() -> str:
    """Path of ninja: of the Python package if it is installed, else from PATH."""
    spec = importlib.util.find_spec("ninja")
    if spec is not None and spec.origin is not None:
        import ninja

        candidate = Path(ninja.BIN_DIR) / "ninja"
        if candidate.is_file():
            return str(candidate)
    found = shutil.which("ninja")
    if found is None:
        raise BuildError("ninja was not found. Install it: pip install ninja")
    return found


def find_cxx() -> list[str]:
    """The words that start the C++ compiler: ``CXX``, else c++, g++ or clang++ from PATH."""
    wanted = os.environ.get("CXX", "").strip()
    # A path, perhaps with spaces, or a command such as "ccache g++".
    candidates = [[wanted], _split(wanted)] if wanted else [["c++"], ["g++"], ["clang++"]]
    for program, *arguments in candidates:
        found = shutil.which(program)
        if found is not None:
            return [found, *arguments]
    looked = f"CXX={wanted}" if wanted else "c++, g++, clang++"
    raise BuildError(
        f"No C++ compiler was found (looked for {looked}). Install one with C++20 "
        "support, such as g++ 11 or later, or install a wheel with prebuilt kernels."
    )


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # an open quotation mark
        return [command]


def find_nvcc() -> str | None:
    """nvcc from ``CUDA_HOME``, PATH, or the ``nvidia-cuda-nvcc`` package; None without one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return str(Path(home) / "bin" / "nvcc")
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return on_path
    site = Path(sysconfig.get_path("purelib"))
    packaged = sorted(site.glob("nvidia/*/bin/nvcc"))
    if not packaged:
        return None
    _check_packaged_cuda(packaged[-1])
    return str(packaged[-1])


def _check_packaged_cuda(nvcc: Path) -> None:
    """nvcc, its headers and nvvm come as separate packages, and must have one minor version."""
    from importlib import metadata

    versions = {}
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise BuildError(
                f"{nvcc} comes from nvidia-cuda-nvcc, but {name} is not installed. Install the "
                "`nvcc` extra of this package, such as: pip install 'apex-optimizers[nvcc]'"
            ) from None
    minors = {".".join(version.split(".")[:2]) for version in versions.values()}
    if len(minors) > 1:
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise BuildError(
            f"The CUDA compiler's packages must have the same major and minor version, got {found}."
            " Install matching ones, such as: pip install 'nvidia-cuda-nvcc==13.0.*' "
            "'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*'"
        )


def find_hipcc() -> str | None:
    """hipcc from ``ROCM_HOME`` or PATH; None without one."""
    home = os.environ.get("ROCM_HOME") or os.environ.get("ROCM_PATH")
    if home and (Path(home) / "bin" / "hipcc").is_file():
        return str(Path(home) / "bin" / "hipcc")
    return shutil.which("hipcc")


def compiler_for(backend: str) -> list[str]:
    """The words that start a backend's compiler.

    Raises:
        BuildError: there is none; with the remedy.
    """
    if backend in ("cpu", "emu", RTC):
        return find_cxx()
    if backend == "cuda":
        compiler = find_nvcc()
        remedy = (
            "Set CUDA_HOME, put nvcc on PATH, or install the `nvcc` extra of this package, which "
            "brings nvcc of CUDA 13: pip install 'apex-optimizers[nvcc]'"
        )
    else:
        compiler = find_hipcc()
        remedy = "Install ROCm's hipcc and put it on PATH, or set ROCM_HOME."
    if compiler is None:
        name = "nvcc" if backend == "cuda" else "hipcc"
        raise BuildError(f"{name} was not found, so no {backend} kernel can be compiled. {remedy}")
    return [compiler]


def compiler_version(compiler: list[str]) -> str:
    """The compiler's own words on its version: part of the digest and of the manifest.

    Raises:
        BuildError: it does not start, or does not answer.
    """
    return _version(tuple(compiler))


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    environment = {**os.environ, "HIP_PLATFORM": "amd"}  # else hipcc appends what it finds of nvcc
    options = {"capture_output": True, "text": True, "errors": "replace", "check": False}
    command = [*compiler, "--version"]
    try:
        result = subprocess.run(command, env=environment, timeout=VERSION_TIMEOUT_S, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(
            f"The compiler does not answer: {error}. Repair it, or name another one with CXX, "
            "CUDA_HOME or ROCM_HOME."
        ) from error
    said = result.stdout.strip() or result.stderr.strip()
    if said:
        return said
    file = os.stat(compiler[0])  # tells compilers apart that say nothing
    return f"{compiler[0]} of {file.st_size} bytes, {file.st_mtime_ns}"


def toolkit_major(backend: str) -> int | None:
    """The major version of the CUDA or ROCm that compiles for a GPU; None if it is not said."""
    pattern = {"cuda": r"release (\d+)\.", "hip": r"HIP version: (\d+)\."}.get(backend)
    found = pattern and re.search(pattern, compiler_version(compiler_for(backend)))
    return int(found[1]) if found else None


def newest_ptx(source: Path) -> int:
    """What a source's code for CUDA is translated from at most: the 90 of ``#define APEX_PTX 90``.

    Raises:
        BuildError: something else than a number stands there.
    """
    asked = _PTX.search(source.read_text())
    if asked is None:
        return _SHARED_PTX
    if not re.fullmatch(r"\d+", asked[1]):
        raise BuildError(
            f"{source}: expected a compute capability without its dot, as in `#define APEX_PTX "
            f"90`, got {asked[1]!r}."
        )
    return int(asked[1])


def compile_flags(target: Target, ptx: int = _SHARED_PTX) -> list[str]:
    """Everything between the compiler and ``-c``, but for include paths of a single op.

    Args:
        target: what to compile for.
        ptx: for CUDA, what :func:`newest_ptx` says of the source.
    """
    if target.backend == "cpu":
        flags = [*_COMMON, *_CPU_FLAGS, "-Wall", "-Wextra"]
        if target.level != "baseline":
            flags.append(f"-march={target.level}")
        if target.level == "x86-64-v4":
            flags.append("-mprefer-vector-width=512")
        return [*flags, f"-DAPEX_ISA={target.level.replace('-', '_')}"]
    if target.backend == "emu":
        quiet = ("-Wall", "-Wextra", "-Wno-unknown-pragmas")  # "unroll" is for GPU compilers
        return [*_COMMON, *_CPU_FLAGS, *quiet, "-O1", "-g1", *_EMULATED_FLAGS]
    if target.backend == RTC:
        return [*_COMMON, *_CPU_FLAGS, *_RTC_FLAGS, "-include", "apex/rtc/host.h"]
    if target.backend == "cuda":
        flags = [
            *_COMMON,
            "-x",
            "cu",
            "-Xcompiler",
            ",".join(_CPU_FLAGS),
            "--expt-relaxed-constexpr",
        ]
        # Warnings that torch's own headers raise say nothing about our kernels.
        flags += ["-diag-suppress=20012,20011", "-Wno-deprecated-gpu-targets"]
        for arch in target.archs:
            flags += ["-gencode", f"arch={_virtual_arch(arch, ptx)},code={arch}"]
        return flags
    flags = [*_COMMON, *_CPU_FLAGS, "-x", "hip", "-D__HIP_PLATFORM_AMD__=1"]
    return [*flags, *(f"--offload-arch={arch}" for arch in target.archs)]


def _virtual_arch(arch: str, ptx: int) -> str:
    """What code for a GPU is translated from: ``compute_80`` for all since Ampere.

    Few kernels ask for anything newer, and one translation serves all GPUs: a third of the time
    that a wheel for four would take. A source that asks has one more, for the GPUs that have it.
    """
    kind, _, number = arch.partition("_")
    if kind == "sm" and number.isdigit():  # sm_90a and the like are what they are
        number = str(ptx if int(number) >= ptx else min(int(number), _SHARED_PTX))
    return f"compute_{number}"


def emulator_flags() -> list[str]:
    """How the emulator itself is compiled: without the checks that it is there to make."""
    own = ("-O2", "-g1", "-U_FORTIFY_SOURCE", "-DAPEX_EMULATE_TENSORS")
    return ["-std=c++20", *_CPU_FLAGS, "-Wall", "-Wextra", *own]


def include_flags(target: Target) -> list[str]:
    torch_include = torch_root() / "include"
    flags = [f"-I{INCLUDE}"]
    if target.backend == "emu":
        flags += [f"-I{EMULATION.parent}", "-include", str(EMULATION / "backend.h")]
    if target.backend == "hip" and not _has_thrust(Path(compiler_for("hip")[0])):
        # Debian's hipcc has no Thrust; torch's headers only name its complex type.
        flags += ["-isystem", str(INCLUDE / "apex" / "compat")]
    return [*flags, "-isystem", str(torch_include)]


def _has_thrust(hipcc: Path) -> bool:
    """Whether the ROCm that hipcc belongs to brings Thrust, as AMD's does and Debian's does not."""
    roots = {hipcc.parent.parent, hipcc.resolve().parent.parent}
    return any((root / "include" / "thrust" / "complex.h").is_file() for root in roots)


def path_flags(target: Target, op_folder: Path, build_folder: Path) -> list[str]:
    """Keep this machine's paths out of libraries, so that where they are built does not matter.

    ccache makes paths relative to the folder that the compiler runs in.
    """
    places = {op_folder.resolve(): op_folder.name, INCLUDE: "include", torch_root(): "torch"}
    places |= {os.path.relpath(path, build_folder): name for path, name in places.items()}
    flags = [f"-ffile-prefix-map={path}={name}" for path, name in places.items()]
    if target.backend == "cuda":  # nvcc gives these to a shell of its own, as they are
        return [word for flag in flags for word in ("-Xcompiler", shlex.quote(flag))]
    return flags


def link_flags(target: Target) -> list[str]:
    """Linker arguments: torch by name only, so that any installed torch satisfies them."""
    libraries = torch_root() / "lib"
    flags = ["-shared", f"-L{libraries}"]
    if target.backend == "cpu":
        return [*flags, "-Wl,--as-needed", "-ltorch_cpu"]
    if target.backend == "emu":
        return [*flags, *(f"-Wl,--wrap={name}" for name in _WRAPPED), "-ltorch_cpu", "-ldl"]
    if target.backend == RTC:
        return [*flags, "-Wl,--gc-sections", "-ltorch_cpu", "-ldl"]
    stub = {"cuda": "torch_cuda", "hip": "torch_hip"}[target.backend]
    if target.backend == "cuda":
        # No kernel calls another file's: linking them would only write this machine's paths down.
        flags += ["--cudart", "static", "--no-device-link"]
        # nvcc looks into lib64, and the package index's has lib alone.
        own = Path(compiler_for("cuda")[0]).parent.parent / "lib"
        if (own / "libcudart_static.a").is_file():
            flags.append(f"-L{own}")
    return [*flags, "-ltorch_cpu", "-L.", f"-l{stub}"]


# Hardly a symbol is visible outside of a wheel's library: torch finds the kernels by their
# registration. Those of apex/rtc/host.h connect it.
NO_EXPORTS = "{ global: apex_rtc_*; local: *; };\n"
# What is compiled into it beside the ops, and why: see there.
OLD_LIBRARIES = INCLUDE / "apex" / "old_libraries.cpp"


def old_libraries_flags() -> list[str]:
    prefix = f"-ffile-prefix-map={INCLUDE}=include"
    return ["-std=c++20", "-O2", *_CPU_FLAGS, "-fno-builtin", prefix]


def portable_link_flags(target: Target, version_script: str) -> list[str]:
    """Linker arguments of a wheel's library: no exports, no debug data, libgcc's own functions."""
    words = [f"--version-script={version_script}", "--strip-all"]
    if target.backend == "cuda":  # nvcc hands on what follows its own option
        return [word for each in words for word in ("-Xlinker", each)] + ["-lgcc"]
    return [*(f"-Wl,{word}" for word in words), "-lgcc"]


def gpu_stub_name(target: Target) -> str | None:
    """The torch library that GPU kernels need by name and that a CPU torch does not have."""
    return {"cuda": "libtorch_cuda.so", "hip": "libtorch_hip.so"}.get(target.backend)
