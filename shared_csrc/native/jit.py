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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apex"


def is_forbidden() -> bool:
    """Whether ``APEX_JIT=0`` forbids compiling at run time."""
    return os.environ.get("APEX_JIT", "1") in ("0", "")


def target_of(device_type: str) -> Target:
    """The best target for a device of this machine."""
    if device_type == "cpu" and targets.is_emulating():
        return Target("emu")
    if device_type == "cpu":
        return Target("cpu", targets.supported_cpu_levels()[0])
    import torch

    if torch.version.hip is not None:
        listed = os.environ.get("PYTORCH_ROCM_ARCH", "")
        archs = tuple(listed.replace(";", " ").split())
        own = torch.cuda.get_device_properties().gcnArchName.partition(":")[0]
        return Target("hip", archs=archs or (own,))
    listed = targets.cuda_arch_list(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if listed:
        return Target("cuda", archs=listed)
    major, minor = torch.cuda.get_device_capability()
    return Target("cuda", archs=(f"sm_{major}{minor}",))


def can_build(target: Target) -> bool:
    """Whether a first-use build for this target is allowed and its tools are there."""
    if is_forbidden():
        return False
    try:
        toolchain.compiler_for(target.backend)
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
        BuildError: building is forbidden or fails.
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
    folder = library.parent
    if library.is_file():
        return library
    from filelock import FileLock, Timeout

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
    return library


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
