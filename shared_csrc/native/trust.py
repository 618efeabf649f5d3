"""Decides which folders and libraries of the cache are safe to load: code in them runs as the user.

Names in the cache are predictable, so anyone who can write to it can run code as those who load
from it. Therefore folders and libraries must belong to this user or to root, and nobody else may
write to them. The same holds for the folders above: who may write there can exchange those below.
A library is opened once, and the open file is what is checked and loaded. Whatever the umask, only
this user can access what is made here.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import BuildError

PRIVATE = 0o700
_MOST_LINKS = 40  # as Linux follows


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, that only this user can read or write."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        try:
            each.mkdir(PRIVATE)
        except FileExistsError:  # another process was faster
            continue


def make_trusted(root: Path) -> None:
    """Make the cache's folder if it is missing, and check that nobody else can write into it.

    Raises:
        BuildError: someone else owns it, or a folder above it, or may write there.
        OSError: it cannot be made or looked at.
    """
    check_above(root)
    if not root.exists():
        make_private_folder(root)
        check_above(root)
    check_trusted(root)


def check_trusted(path: Path) -> None:
    """Check that nobody but this user and root can have written a folder or file of the cache.

    Raises:
        BuildError: someone else owns it or may write to it; with the remedy.
        OSError: it cannot be looked at.
    """
    facts = path.stat()
    problem = _who_else(facts)
    if problem is not None:
        kind = "folder" if stat.S_ISDIR(facts.st_mode) else "library"
        mends = f"Run `chmod -R go-w {path}`, after a look at who wrote what is in it"
        raise _refusal(f"{kind} {path}", problem, None if _is_foreign(facts) else mends)


def check_above(folder: Path) -> None:
    """Check the folders above one, and links on the way: none lets others exchange it.

    In a folder with the sticky bit, such as ``/tmp``, others can exchange only what is theirs.

    Raises:
        BuildError: someone else owns one of them or may write to it; with the remedy.
        OSError: one cannot be looked at.
    """
    for path, facts in _way_to(folder):
        is_link, is_sticky = stat.S_ISLNK(facts.st_mode), facts.st_mode & stat.S_ISVTX
        problem = None if _is_unmapped(facts.st_uid) and not is_link else _owner(facts)
        if not is_link and not is_sticky:
            problem = problem or _writers(facts)
        if problem is not None:
            mends = f"Run `chmod go-w {path}`, if nobody else has to write there"
            kind = "link" if is_link else "folder"
            what = f"{kind} {path}, above the cache folder {folder},"
            raise _refusal(what, problem, None if _is_foreign(facts) else mends)


def _refusal(what: str, problem: str, mends: str | None) -> BuildError:
    remedy = "Set APEX_CACHE_DIR to a folder of your own"
    if mends is not None:
        remedy = f"{mends}, or set APEX_CACHE_DIR to a folder of your own"
    return BuildError(
        f"The {what} {problem}; whoever can write there can run code as you, so nothing is "
        f"loaded from it. {remedy}."
    )


def _way_to(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The folders above one that are there, from the root on, and the links on the way."""
    waiting, here, links = list(folder.absolute().parts[1:]), Path("/"), 0
    yield here, here.lstat()
    while waiting:
        part = waiting.pop(0)
        if part == "..":
            here = here.parent
            continue
        try:
            facts = (here / part).lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISLNK(facts.st_mode):
            here = here / part
            if waiting:
                yield here, facts
            continue
        yield here / part, facts
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        target = Path(os.readlink(here / part))
        waiting = [*target.parts[target.is_absolute() :], *waiting]
        here = Path("/") if target.is_absolute() else here


def _is_foreign(facts: os.stat_result) -> bool:
    return facts.st_uid not in (os.geteuid(), 0)


def _owner(facts: os.stat_result) -> str | None:
    if not _is_foreign(facts):
        return None
    return f"belongs to user {facts.st_uid}, and this process runs as user {os.geteuid()}"


def _writers(facts: os.stat_result) -> str | None:
    if facts.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if facts.st_mode & stat.S_IWGRP and not _is_private_group(facts.st_gid):
        return f"can be written by group {facts.st_gid}"
    return None


def _who_else(facts: os.stat_result) -> str | None:
    """Who else owns or may write a folder or file; None if nobody does."""
    return _owner(facts) or _writers(facts)


def _is_unmapped(user_id: int) -> bool:
    """Whether it stands for all users that a container does not know, root of the host among them.

    Containers of a user without rights show the folders of the host's root so.
    """
    try:
        maps = Path("/proc/self/uid_map").read_text().split()
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        return False
    return user_id == overflow and maps != ["0", "0", "4294967295"]


def forbids_code(path: Path) -> bool:
    """Whether the file system of a file or folder forbids running code (``noexec``)."""
    return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)


def _is_private_group(group_id: int) -> bool:
    """Whether a group is this user's alone; systems that make one for each user have umask 002."""
    import grp
    import pwd

    try:
        group = grp.getgrgid(group_id)
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


class CheckedLibrary(type(Path())):  # type: ignore[misc]
    """The path of a library that was checked, and its open file, which is what to load.

    Attributes:
        descriptor: of the open file; it is closed with this object.
    """

    descriptor: int | None = None

    @property
    def loadable(self) -> str:
        """A name of the open file, or the path on systems that have no such names.

        Raises:
            BuildError: there are none, and another file lies there now.
        """
        name = f"/proc/self/fd/{self.descriptor}"
        if os.path.exists(name):
            return name
        if self.descriptor is None or not os.path.samestat(os.fstat(self.descriptor), self.stat()):
            raise BuildError(
                f"{self} was exchanged after it was checked, so it is not loaded. Look who writes "
                "to the cache, or set APEX_CACHE_DIR to a folder of your own."
            )
        return str(self)


def open_checked(library: Path) -> CheckedLibrary | None:
    """Open a library of the cache, and check the open file; None if it is missing or damaged.

    Raises:
        BuildError: someone else may have written it.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would wait for who writes
    try:
        descriptor = os.open(library, flags)
    except (FileNotFoundError, NotADirectoryError):
        return None
    checked = CheckedLibrary(library)
    checked.descriptor = descriptor
    weakref.finalize(checked, os.close, descriptor)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        return None
    check_trusted(library.parent)
    problem = _who_else(facts)
    if problem is not None:
        mends = f"Run `chmod -R go-w {library}`, after a look at who wrote what is in it"
        raise _refusal(f"library {library}", problem, None if _is_foreign(facts) else mends)
    try:
        sealed = seal_path(library).read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    with open(descriptor, "rb", closefd=False) as file:
        return checked if sealed == _digest(file) else None


def seal(library: Path) -> str:
    """The text that is written beside a library, to detect damage and replacement."""
    with library.open("rb") as file:
        return _digest(file)


def _digest(file: BinaryIO) -> str:
    return hashlib.sha256(file.read()).hexdigest()


def seal_path(library: Path) -> Path:
    return library.with_suffix(".sha256")
