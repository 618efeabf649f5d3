"""Throw-away virtual environments, and real wheels to install into them."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from importlib import metadata
from pathlib import Path

from ci.workspace import PACKAGES, ROOT, files

NO_KERNELS = {"APEX_BUILD_CPP_OPS": "0", "APEX_BUILD_CUDA_OPS": "0"}

# Runs each statement in a process of its own, forked after torch is imported, because importing
# torch takes a hundred times as long as what is tested. Answers each line, a JSON string, with
# another: "ok" or the exception.
PROBE = """
import json, os, sys, warnings
import torch
warnings.simplefilter("error", RuntimeWarning)
for line in sys.stdin:
    statement = json.loads(line)
    read, write = os.pipe()
    if not os.fork():
        try:
            exec(statement, {})
            text = "ok"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(json.dumps(pipe.read()), flush=True)
    os.wait()
"""


def run(*command, cwd=ROOT, env=None, check=True) -> subprocess.CompletedProcess:
    """Run a command; its output is in the error when it fails."""
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    return done


class Environment:
    """A virtual environment that has this one's packages, but none of Apex's.

    Args:
        folder: where it is made.
        is_empty: whether it has no package at all.
    """

    def __init__(self, folder: Path, *, is_empty: bool = False):
        self.folder = folder
        self._probe = None
        self.python = folder / "bin" / "python"
        run("uv", "venv", "--quiet", "--python", sys.executable, folder)
        (self.site,) = folder.glob("lib/python*/site-packages")
        if is_empty:
            return
        # amp_C.py and other modules at the top level have names of their own.
        ours = {
            file.parts[0]
            for each in metadata.distributions()
            if each.name in PACKAGES
            for file in each.files or ()
        }
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            is_ours = entry.name in ours or entry.suffix == ".pth"
            if "apex" not in entry.name.lower() and not is_ours:
                target = self.site / entry.name
                if not target.exists():
                    target.symlink_to(entry)

    def install(self, *wheels: Path) -> None:
        self.close()
        pip = ("uv", "pip", "install", "--quiet", "--no-deps", "--python", self.python)
        run(*pip, *wheels, env={"UV_NO_CACHE": "1"})

    def uninstall(self, *packages: str) -> None:
        self.close()
        run("uv", "pip", "uninstall", "--quiet", "--python", self.python, *packages)

    def results(self, *statements: str) -> list[str]:
        """Return "ok", or type and text of the exception, for each statement."""
        if self._probe is None:  # kept until something is installed or gone
            command, pipe = [str(self.python), "-c", PROBE], subprocess.PIPE
            self._probe = subprocess.Popen(
                command, cwd=self.folder, stdin=pipe, stdout=pipe, text=True
            )
        answers = []
        for statement in statements:
            print(json.dumps(statement), file=self._probe.stdin, flush=True)
            answers.append(json.loads(self._probe.stdout.readline()))
        return answers

    def close(self) -> None:
        """End the process that runs statements; the next one finds what is installed then."""
        if self._probe is not None:
            self._probe.communicate(timeout=60)
            self._probe = None


def build_wheel(package: Path, output: Path, env=None, *, target="wheel") -> Path:
    """Build a wheel (or ``target="sdist"``) with hatchling, as frontends do, and return it."""
    output.mkdir(parents=True, exist_ok=True)
    known = set(output.iterdir())
    command = (sys.executable, "-m", "hatchling", "build", "-t", target, "-d", output)
    run(*command, cwd=package, env=NO_KERNELS | (env or {}))
    (built,) = set(output.iterdir()) - known
    return built


def build_editable(package: Path, output: Path) -> Path:
    """Build the wheel of an editable install (PEP 660) and return it."""
    output.mkdir(parents=True, exist_ok=True)
    code = "import sys, hatchling.build as h; print(h.build_editable(sys.argv[1]))"
    done = run(sys.executable, "-c", code, output, cwd=package)
    return output / done.stdout.split()[-1]


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


def copy_checkout(target: Path) -> Path:
    """Copy what git tracks, or would, and return the copy's root."""
    for file in files():
        copy = target / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy, follow_symlinks=False)
    run("git", "init", "--quiet", target)
    return target


def main_package(package: str) -> str:
    """Return the import name below apex: apex-amp is apex.amp."""
    return package.removeprefix("apex-")


def forms(package: str) -> list[str]:
    """Return the three ways in which a package is imported."""
    name = main_package(package)
    return [f"from apex import {name}", f"import apex; apex.{name}", f"import apex.{name}"]


__all__ = [
    "NO_KERNELS",
    "PACKAGES",
    "ROOT",
    "Environment",
    "build_editable",
    "build_wheel",
    "copy_checkout",
    "forms",
    "main_package",
    "run",
    "unpack",
]
