"""Hatch hooks of the five packages: the version, the vendored shared code, prebuilt kernels.

A package's ``hatch_build.py`` loads this file from the checkout's ``shared_csrc``, or from the
copy of it that lies in the sdist. No file of the checkout is written, but for the git-ignored
links ``_shared`` and ``apex/__init__.py`` that an editable install makes.
"""

import os
import re
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SHARED = Path(__file__).resolve().parent.parent
# What a wheel needs of shared_csrc: to compile an op on first use, and to load it.
_VENDORED = ("__init__.py", "native/**/*.py", "include/**/*.h", "include/apex/*.cpp")
# What is apex/__init__.py of every package.
_NAMESPACE = "namespace/__init__.py"


class VersionHook(MetadataHookInterface):
    """Takes the version from pyproject.toml's hook table; ``BUILD_VERSION`` may extend it."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["version"] = chosen_version(self.config["version"], os.environ)


def chosen_version(own: str, environ: Mapping[str, str]) -> str:
    """The package's version, or ``BUILD_VERSION`` where that adds a local part: ``1.0.0+cu130``.

    Raises:
        ValueError: BUILD_VERSION is another version. It is often set for the build of something
            else, and a package must not change its version by that.
    """
    wanted = environ.get("BUILD_VERSION") or own
    if wanted != own and not re.fullmatch(rf"{re.escape(own)}\+[a-zA-Z0-9.]+", wanted):
        raise ValueError(
            f"BUILD_VERSION is {wanted!r}, and this package has version {own}: it may only add a "
            f"local part, as in {own}+local. Unset it, or set it for the build of one package."
        )
    return wanted


class BuildHook(BuildHookInterface):
    """Adds ``_shared`` to sdists and wheels, and to wheels the kernels that were asked for."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Ask the isolated build environment for torch where kernels were demanded."""
        from .switches import read_switches

        if self.target_name != "wheel":
            return []
        if not read_switches(_package_folder(Path(self.root)), os.environ).on:
            return []
        return [d for d in self.metadata.core.dependencies if d.startswith(("torch", "ninja"))]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = _package_folder(Path(self.root))
        if version == "editable":
            link(package / "_shared", SHARED)
            link(package.parent / "__init__.py", SHARED / _NAMESPACE)
            return
        inside = package.relative_to(self.root).as_posix()
        for file in vendored_files():
            build_data["force_include"][str(SHARED / file)] = f"{inside}/_shared/{file}"
        namespace = str(SHARED / _NAMESPACE)
        if self.target_name == "wheel":
            build_data["force_include"][namespace] = "src/apex/__init__.py"
            self._add_kernels(package, inside, build_data)
        else:
            build_data["force_include"][namespace] = f"{inside}/_shared/{_NAMESPACE}"
            self._add_names(inside, build_data)

    def _add_kernels(self, package: Path, inside: str, build_data: dict[str, Any]) -> None:
        from .prebuilt import build_prebuilt

        # Kept on the hook: the folder must live until hatch has packed it, and no longer.
        self._scratch = tempfile.TemporaryDirectory(prefix="apex-kernels-")
        kernels = Path(self._scratch.name) / "_kernels"
        if build_prebuilt(package, kernels, os.environ) is None:
            return
        build_data["force_include"][str(kernels)] = f"{inside}/_kernels"
        build_data["pure_python"] = False
        build_data["tag"] = _wheel_tag()

    def _add_names(self, inside: str, build_data: dict[str, Any]) -> None:
        """An sdist has no other package beside it, but must know their names of ops."""
        from .switches import NAMES_FILE, known_names

        self._scratch = tempfile.TemporaryDirectory(prefix="apex-names-")
        file = Path(self._scratch.name) / NAMES_FILE
        file.write_text("".join(f"{name}\n" for name in sorted(known_names())))
        build_data["force_include"][str(file)] = f"{inside}/_shared/{NAMES_FILE}"


def vendored_files() -> list[str]:
    """Return the files of shared_csrc that wheels and sdists carry, as relative POSIX paths."""
    return sorted(f.relative_to(SHARED).as_posix() for p in _VENDORED for f in SHARED.glob(p))


def link(path: Path, target: Path) -> None:
    """Make ``path`` a relative link to a file or folder, unless it is that already."""
    if path.resolve() == target:
        return
    if path.is_symlink():  # left over from a checkout that was moved
        path.unlink()
    path.symlink_to(
        os.path.relpath(target, path.parent.resolve()), target_is_directory=target.is_dir()
    )


def _package_folder(root: Path) -> Path:
    """Return the folder of the op library: the one package below src/apex that has _ops.py."""
    found = sorted(root.glob("src/apex/*/_ops.py"))
    if len(found) != 1:
        raise ValueError(
            f"{root.name}: expected one src/apex/<package>/_ops.py, found {len(found)}. It names "
            "the package's op library and tells the build where kernels and shared code go."
        )
    return found[0].parent


def _wheel_tag() -> str:
    """Return the tag of a wheel with kernels: torch loads them, so they serve every Python."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"py3-none-{platform}"
