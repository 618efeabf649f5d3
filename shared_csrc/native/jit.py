"""Builds one op for one device on its first use, into the user's cache."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

from . import targets, toolchain, trust
from .build import BUILD_TIMEOUT_S, Op, build, digest
from .errors import BuildError
from .targets import Target

logger = logging.getLogger("apex")

LOCK_TIMEOUT_S = BUILD_TIMEOUT_S + 60  # a stale lock cannot outlive its process

_DEVICES = {"cuda": "NVIDIA GPUs", "hip": "AMD GPUs", "emu": "the emulated GPU"}
_DEVICES[toolchain.RTC] = "NVIDIA and AMD GPUs"
# The variable that chooses who compiles for a GPU: at run time kernel by kernel, or whole ops.
COMPILERS = {
    "cuda": ("APEX_CUDA_COMPILER", "nvrtc", "nvcc"),
    "hip": ("APEX_HIP_COMPILER", "hiprtc", "hipcc"),
}
# Builds that failed in this process: library and environment -> the error's text. No lock beyond
# that of the OpLibrary whose ops are built: of an entry that is missed, a build fails once more.
_failed: dict[tuple[Path, tuple[str, ...], frozenset[tuple[str, str]]], str] = {}


def cache_folder() -> Path:
    """``APEX_CACHE_DIR``, else ``$XDG_CACHE_HOME/apex``, else ``~/.cache/apex``."""
    chosen = os.environ.get("APEX_CACHE_DIR", "")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apex"
    except RuntimeError as error:
        raise BuildError(
            f"There is no folder for kernels that are compiled here: user {os.getuid()} has no "
            "home folder. Set APEX_CACHE_DIR to a folder that can be written."
        ) from error


def is_forbidden() -> bool:
    """Whether ``APEX_JIT=0`` forbids compiling at run time."""
    return os.environ.get("APEX_JIT", "1") in ("0", "")


def backend_of(device_type: str) -> str:
    """The backend for which a kind of device of this machine has kernels compiled here.

    Raises:
        BuildError: ``APEX_CUDA_COMPILER`` or ``APEX_HIP_COMPILER`` names a compiler that there is
            not.
    """
    if device_type == "cpu":
        return "emu" if targets.is_emulating() else "cpu"
    whole, wanted = _chosen()
    variable, at_run_time, of_ops = COMPILERS[whole]
    if wanted not in (at_run_time, of_ops, ""):
        raise BuildError(f"{variable} must be {at_run_time} or {of_ops}, got {wanted!r}.")
    return whole if wanted == of_ops else toolchain.RTC


def _chosen() -> tuple[str, str]:
    """The backend of whole ops on this torch's GPUs, and the compiler that the user has chosen."""
    import torch

    whole = "cuda" if torch.version.hip is None else "hip"
    return whole, os.environ.get(COMPILERS[whole][0], "")


def backends_of(device_type: str) -> tuple[str, ...]:
    """The backends whose libraries of a wheel a kind of device runs.

    On GPUs these are those that were compiled whole and those whose kernels are compiled at run
    time, unless the user names one compiler.
    """
    backend = backend_of(device_type)
    if backend != toolchain.RTC:
        return (backend,)
    whole, wanted = _chosen()
    return (backend,) if wanted else (whole, backend)


def own_rocm_arch() -> str:
    """The architecture of the current AMD GPU, such as ``gfx90a``."""
    import torch

    return torch.cuda.get_device_properties().gcnArchName.partition(":")[0]


def target_of(device_type: str) -> Target:
    """What to compile for a device of this machine on first use.

    ``TORCH_CUDA_ARCH_LIST`` and ``PYTORCH_ROCM_ARCH`` add GPUs to the one in the machine: container
    images often set them to the cards they were built for, and the machine may have another one.
    """
    backend = backend_of(device_type)
    if backend == "cpu":
        return Target("cpu", targets.supported_cpu_levels()[0])
    if backend in ("emu", toolchain.RTC):
        return Target(backend)
    if backend == "hip":
        archs = tuple(os.environ.get("PYTORCH_ROCM_ARCH", "").replace(";", " ").split())
        own = own_rocm_arch()
        covered = any(arch.partition(":")[0] == own for arch in archs)
        return Target("hip", archs=archs if covered else (*archs, own))
    import torch

    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    archs = targets.cuda_arch_list("" if listed == "native" else listed)
    major, minor = torch.cuda.get_device_capability()
    covered = targets.runs_on(archs, (major, minor))
    return Target("cuda", archs=archs if covered else (*archs, f"sm_{major}{minor}"))


def why_not_build(op: Op, backend: str) -> str | None:
    """Why no first-use build of an op is possible, with the remedy; None if one can be tried."""
    if is_forbidden():
        return "APEX_JIT=0 forbids compiling them. Unset APEX_JIT, or install a wheel with kernels"
    if not op.source.is_file():
        return f"their source {op.source} is missing. Reinstall the package"
    try:
        toolchain.compiler_for(backend)
        toolchain.find_ninja()
    except BuildError as error:
        return str(error).removesuffix(".")
    return None


def library_path(op: Op, target: Target, *, package: str) -> Path:
    """Where the op's library for a target lies in the cache once it is built."""
    name = f"{package.replace('.', '_')}-{op.name}-{digest(op, target)}"
    return cache_folder() / name / f"{target.name}.so"


def build_op(op: Op, target: Target, *, package: str) -> trust.CheckedLibrary:
    """The op's library for a target, checked and open, from the cache or freshly built.

    Ranks that start together build once: the first holds a lock, the others find the result.

    Raises:
        BuildError: building is forbidden or fails, or the cache cannot be used.
    """
    if is_forbidden():
        raise BuildError(
            f"{package}: no prebuilt {op.name} for {target.name} is in this installation, and "
            "APEX_JIT=0 forbids compiling it. Install a wheel with prebuilt kernels for this "
            "platform, or unset APEX_JIT."
        )
    if not op.source.is_file():
        raise BuildError(
            f"{package}: {op.name} has no prebuilt library for {target.name}, and its source "
            f"{op.source} is missing. Reinstall the package."
        )
    library = library_path(op, target, package=package)
    root = library.parent.parent
    try:
        trust.make_trusted(root)
        if trust.forbids_code(root):  # said now, not after a minute of compiling
            raise BuildError(
                f"{package}: {op.name} ({target.name}) cannot be kept in the cache folder {root}: "
                "its file system forbids running code (noexec). Set APEX_CACHE_DIR to a folder on "
                "one that allows it."
            )
        return trust.open_checked(library) or _build_once(op, target, library, package)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise BuildError(
            f"{package}: {op.name} ({target.name}) cannot be built in the cache folder "
            f"{root}: {error}. Set APEX_CACHE_DIR to a folder that can be written."
        ) from error


def is_cached(library: Path) -> bool:
    """Whether the cache has the library, as it was built.

    Raises:
        BuildError: someone else may have written it.
    """
    return trust.open_checked(library) is not None


def _build_once(op: Op, target: Target, library: Path, package: str) -> trust.CheckedLibrary:
    """Build unless another process did so while this one waited for the lock."""
    from filelock import FileLock, Timeout

    compiler = tuple(toolchain.compiler_for(target.backend))
    key = (library, compiler, frozenset(os.environ.items()))
    if key in _failed:
        raise BuildError(
            f"{_failed[key]}\nThis process did not try again, because neither sources nor "
            "environment have changed since."
        )
    folder = library.parent
    lock = FileLock(f"{folder}.lock", timeout=0)
    try:
        try:
            lock.acquire()
        except Timeout:
            logger.warning("apex: waiting for another process that compiles %s.", op.name)
            lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout:
        raise BuildError(
            f"{package}: another process has been building {op.name} for {LOCK_TIMEOUT_S} s "
            f"(lock {folder}.lock). End it, or remove the lock, and try again."
        ) from None
    try:
        checked = trust.open_checked(library)
        if checked is None:
            try:
                _build_into(op, target, library, package)
            except BuildError as error:
                if "No space left on device" not in str(error):  # which may pass
                    _failed[key] = str(error)
                raise
            checked = trust.open_checked(library)
        if checked is None:
            raise OSError(f"{library} is not what was built a moment ago")
        return checked
    finally:
        lock.release()


def _build_into(op: Op, target: Target, library: Path, package: str) -> None:
    """Build in a fresh folder and move the result into place in one step."""
    folder = library.parent
    where = _DEVICES.get(target.backend, "the CPU")
    logger.warning(
        "apex: compiling %s for %s, once, about 10 to 70 s; it is kept in %s.",
        op.name,
        where,
        folder.parent,
    )
    prefix = f".{folder.name}-"
    for left in folder.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    log = folder.with_name(f"{folder.name}.log")
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        built = build([op], [target], work, package=package, log=log)[target]
        built.chmod(trust.PRIVATE)
        seal = work / "seal"
        seal.write_text(trust.seal(built))
        trust.make_private_folder(folder)
        trust.check_trusted(folder)
        # A library without its own seal beside it is not loaded, so the order does not matter.
        os.replace(seal, trust.seal_path(library))
        os.replace(built, library)
    except BuildError:
        raise  # its message names the log
    except BaseException:
        log.unlink(missing_ok=True)
        raise
    else:
        log.unlink(missing_ok=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
