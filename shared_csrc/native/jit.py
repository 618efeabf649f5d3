"""Builds one op for one device on its first use, into the user's cache."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

from . import targets, toolchain
from .build import Op, build, digest
from .errors import BuildError
from .targets import Target

logger = logging.getLogger("apex")

LOCK_TIMEOUT_S = 1800  # a stale lock cannot outlive its process; this bounds a hanging compiler


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
    """The backend whose kernels a kind of device of this machine runs."""
    if device_type == "cpu":
        return "emu" if targets.is_emulating() else "cpu"
    import torch

    return "cuda" if torch.version.hip is None else "hip"


def own_rocm_arch() -> str:
    """The architecture of the current AMD GPU, such as ``gfx90a``."""
    import torch

    return torch.cuda.get_device_properties().gcnArchName.partition(":")[0]


def target_of(device_type: str) -> Target:
    """What to compile for a device of this machine on first use.

    ``TORCH_CUDA_ARCH_LIST`` and ``PYTORCH_ROCM_ARCH`` add GPUs to the one that is there: images
    often set them to what they were built for, which need not be the card that they run on.
    """
    backend = backend_of(device_type)
    if backend == "cpu":
        return Target("cpu", targets.supported_cpu_levels()[0])
    if backend == "emu":
        return Target("emu")
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


def can_build(backend: str) -> bool:
    """Whether a first-use build for this backend is allowed and its tools are there."""
    if is_forbidden():
        return False
    try:
        toolchain.compiler_for(backend)
        toolchain.find_ninja()
    except BuildError:
        return False
    return True


def library_path(op: Op, target: Target, *, package: str) -> Path:
    """Where the op's library for a target lies in the cache once it is built."""
    name = f"{package.replace('.', '_')}-{op.name}-{digest(op, target)}"
    return cache_folder() / name / f"{target.name}.so"


def build_op(op: Op, target: Target, *, package: str) -> Path:
    """The op's library for a target, from the cache or freshly built.

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
    try:
        if not library.is_file():
            _build_once(op, target, library, package)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise BuildError(
            f"{package}: {op.name} ({target.name}) cannot be built in the cache folder "
            f"{library.parent.parent}: {error}. Set APEX_CACHE_DIR to a folder that can be written."
        ) from error
    return library


def _build_once(op: Op, target: Target, library: Path, package: str) -> None:
    """Build unless another process did so while this one waited for the lock."""
    from filelock import FileLock, Timeout

    folder = library.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{folder}.lock", timeout=LOCK_TIMEOUT_S):
            if not library.is_file():
                _build_into(op, target, library, package)
    except Timeout:
        raise BuildError(
            f"{package}: another process has been building {op.name} for {LOCK_TIMEOUT_S} s "
            f"(lock {folder}.lock). End it, or remove the lock, and try again."
        ) from None


def _build_into(op: Op, target: Target, library: Path, package: str) -> None:
    """Build in a fresh folder and move the result into place in one step."""
    logger.info("%s: compiling %s (%s) for first use.", package, op.name, target.name)
    work = Path(tempfile.mkdtemp(prefix=f".{op.name}-", dir=library.parent.parent))
    try:
        built = build([op], [target], work, package=package)[target]
        library.parent.mkdir(parents=True, exist_ok=True)
        os.replace(built, library)
    except BuildError:
        # The folder stays for the `ninja -C` that the message names.
        raise
    shutil.rmtree(work, ignore_errors=True)
