"""Places where things are missing or forbidden: environments, file systems, users.

Mounts are made in a namespace of their own and vanish with the process that sees them.
"""

import functools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from environments import Environment, run

from ci.workspace import DIST

# What this machine's variables would change.
OWN_VARIABLES = ("APEX_", "PIP_", "UV_", "XDG_", "CXX", "CCACHE_DIR", "PYTHONPATH", "HOME")
NOBODY = 65534
NAMELESS = 54321  # a user that no file of the system knows, as in `docker run --user`
NO_COMPILER = {"PATH": "/nowhere", "CXX": "/nowhere/g++"}
# `python -m apex.<package> --check` runs this too, after it has looked for compilers.
AN_OP = "from apex.amp.__main__ import example; example('cpu'); print('it runs')"


class Place:
    """An environment, a home folder of its own, and what a user types there.

    Args:
        folder: where both are made.
        is_empty: whether the environment has no torch, and no other package.
    """

    def __init__(self, folder: Path, *, is_empty: bool = False):
        folder.chmod(0o755)  # tests run as other users, too
        self.environment = Environment(folder / "environment", is_empty=is_empty)
        self.python = self.environment.python
        self.site = self.environment.site
        self.home = folder / "home"
        self.home.mkdir()
        pip = self.python.with_name("pip")
        pip.write_text(f'#!/bin/sh\nexec {shlex.quote(str(self.python))} -m pip "$@"\n')
        pip.chmod(0o755)

    def run(self, *command, inside=(), **variables):
        """Run a command in the home folder; ``inside`` is what :func:`seeing` gives."""
        words = [str(word) for word in (*inside, *command)]
        environ = clean_variables() | {"HOME": str(self.home)} | variables
        environ = {name: value for name, value in environ.items() if value is not None}
        options = {"capture_output": True, "text": True, "timeout": 600, "check": False}
        return subprocess.run(words, cwd="/", env=environ, **options)

    def execute(self, code, **options):
        """Run Python code."""
        return self.run(self.python, "-c", code, **options)

    def pip(self, *arguments, **options):
        """Run pip of the environment, or, where it is empty, of the tests."""
        return self.run(sys.executable, "-m", "pip", "--python", self.python, *arguments, **options)

    def install(self, *requirements, **options):
        """Install with pip; it must succeed."""
        return succeeded(self.pip("install", *requirements, **options))

    def doctor(self, package="amp", *options, **where):
        return self.run(self.python, "-m", f"apex.{package}", *options, **where)

    def follow(self, remedy: str, **variables):
        """Type the command that a text of ours names; the index is ``dist/``."""
        index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(DIST)}
        path = {"PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"}
        return succeeded(self.run("sh", "-euc", remedy, **index, **path, **variables))


def succeeded(done):
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


def last_line(done) -> str:
    """The end of what a failed program says: the exception and its text."""
    assert done.returncode == 1, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done.stderr.rstrip().splitlines()[-1]


def said(done) -> str:
    """What a failed program says, in one line."""
    assert done.returncode == 1, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return " ".join(done.stderr.split())


def runs(done) -> bool:
    succeeded(done)
    return done.stdout.endswith("it runs\n")


def clean_variables() -> dict[str, str]:
    """The variables of this process that do not steer Apex, pip or uv; ccache keeps its folder."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(OWN_VARIABLES)}
    for name in ("APEX_COMPILER_LAUNCHER", "PIP_CERT", "PIP_DEFAULT_TIMEOUT"):
        if name in os.environ:
            kept[name] = os.environ[name]
    if "APEX_COMPILER_LAUNCHER" in kept:
        kept["CCACHE_DIR"] = run("ccache", "-k", "cache_dir").stdout.strip()
    return kept


def seeing(*mounts: str, user: int | None = None, folder: Path | None = None) -> list[str]:
    """Return the words that begin a command which sees other mounts, or runs as another user.

    Args:
        mounts: shell commands that mount, run as root: see :func:`read_only` and :func:`noexec`.
        user: the number of the user that the command runs as.
        folder: what this user must be able to reach, beside Python and the wheels.
    """
    if user is None:
        return [*_new_namespace(), "sh", "-euc", "\n".join([*mounts, 'exec "$@"']), "sh"]
    if os.geteuid() != 0:
        pytest.skip("only root can run a program as another user")
    reached = _reaching([Path(sys.base_prefix), Path(sys.prefix), DIST, folder])
    script = "\n".join([*reached, *mounts, 'exec "$@"'])
    words = [*_new_namespace(), "sh", "-euc", script, "sh"]
    return [*words, "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


def read_only(folder: Path) -> str:
    name = shlex.quote(str(folder))
    return f"mount --bind {name} {name} && mount -o remount,bind,ro {name}"


def noexec(folder: Path) -> str:
    name = shlex.quote(str(folder))
    return f"mount --bind {name} {name} && mount -o remount,bind,noexec {name}"


@functools.cache
def _new_namespace() -> list[str]:
    """What begins a command with mounts of its own, for root, and for others where they may."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not there, so nothing can be mounted for one process alone")
    for more in ([], ["--map-root-user"]):
        words = ["unshare", *more, "--mount", "--propagation", "private"]
        done = subprocess.run([*words, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False)
        if done.returncode == 0:
            return words
    pytest.skip("this user may not mount anything, not even for one process alone")


def _reaching(folders: list[Path]) -> list[str]:
    """Commands that hide the folders that are closed to other users, but show ``folders``."""
    above = {
        folder: [p for p in folder.parents if not p.stat().st_mode & 0o001] for folder in folders
    }
    hidden = {closed[-1] for closed in above.values() if closed}
    shown = [folder for folder, closed in above.items() if closed]
    commands = ["mount -t tmpfs tmpfs /mnt"]
    for i, folder in enumerate(shown):
        commands += [f"mkdir /mnt/{i}", f"mount --bind {shlex.quote(str(folder))} /mnt/{i}"]
    commands += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(each))}" for each in hidden]
    for i, folder in enumerate(shown):
        name = shlex.quote(str(folder))
        commands += [f"mkdir -p {name}", f"mount --bind /mnt/{i} {name}"]
    return [*commands, "umount -R /mnt"]
