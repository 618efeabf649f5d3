"""Decides which folders and libraries of the cache are safe to load: code in them runs as the user.

Names in the cache are predictable, so anyone who can write to it can run code as those who load
from it. Therefore folders and libraries must belong to this user or to root, and nobody else may
write to them. Whatever the umask, only this user can access what is made here.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from .errors import BuildError

PRIVATE = 0o700


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


def check_trusted(path: Path) -> None:
    """Check that nobody but this user and root can have written a folder or file of the cache.

    Raises:
        BuildError: someone else owns it or may write to it; with the remedy.
        OSError: it cannot be looked at.
    """
    facts = path.stat()
    own = os.geteuid()
    kind = "folder" if stat.S_ISDIR(facts.st_mode) else "library"
    if facts.st_uid not in (own, 0):
        problem = f"belongs to user {facts.st_uid}, and this process runs as user {own}"
        remedy = "Set APEX_CACHE_DIR to a folder of your own"
    elif facts.st_mode & stat.S_IWOTH:
        problem = "can be written by every user"
        remedy = f"Run `chmod -R go-w {path}`, after a look at who wrote what is in it"
    elif facts.st_mode & stat.S_IWGRP and not _is_private_group(facts.st_gid):
        problem = f"can be written by group {facts.st_gid}"
        remedy = f"Run `chmod -R go-w {path}`, after a look at who wrote what is in it"
    else:
        return
    if remedy.startswith("Run"):
        remedy += ", or set APEX_CACHE_DIR to a folder of your own"
    raise BuildError(
        f"The {kind} {path} {problem}; whoever can write there can run code as you, so nothing is "
        f"loaded from it. {remedy}."
    )


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


def seal(library: Path) -> str:
    """The text that is written beside a library, to detect damage and replacement."""
    return hashlib.sha256(library.read_bytes()).hexdigest()


def seal_path(library: Path) -> Path:
    return library.with_suffix(".sha256")


def is_intact(library: Path) -> bool:
    """Whether a library is as it was built: loading a truncated one ends the process."""
    try:
        return seal_path(library).read_text() == seal(library)
    except (FileNotFoundError, UnicodeDecodeError):
        return False
