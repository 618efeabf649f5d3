"""What changed since a base commit; ci/samples.py and ci/cover.py say what CI takes of the rest.

The base is ``CI_BASE``, by default the newest commit more than four hours older than HEAD, which is
about a piece of work. Files that are not committed count too. Where git cannot tell (no history, a
shallow clone, no such base), everything counts as changed.
"""

import os
import re
import subprocess
from pathlib import Path

from ci.workspace import PACKAGES, ROOT

LATELY = 4 * 3600
SHARED = "shared"
EVERYTHING = frozenset([*PACKAGES, "examples", SHARED])
# Numbers and exceptions that checks of `emulate`, `kernels` and `plants` compare with.
NUMBERS = re.compile(r"ci/(gpu_costs|accepted_\w+|campaign|plants)\.toml")
# What `changed_files` raises where git cannot tell.
UNKNOWN = (LookupError, OSError, ValueError, subprocess.CalledProcessError)


def changed(root: Path = ROOT, base: str | None = None) -> frozenset[str]:
    """Return the packages that changed, "examples" where these or what they import did, "shared".

    Where git cannot tell, everything did.
    """
    try:
        return affected(changed_files(root, base or os.environ.get("CI_BASE")))
    except UNKNOWN:
        return EVERYTHING


def seed(root: Path = ROOT) -> str:
    """Return what the sample of a commit depends on: other at each commit, the same if repeated."""
    return git(root, "rev-parse", "HEAD")


def affected(files: list[str]) -> frozenset[str]:
    """Return what the files are a part of; a file that is not known to matter little is shared."""
    found = set()
    for file in files:
        top, _, rest = file.partition("/")
        if top == "packages" and rest.partition("/")[0] in PACKAGES:
            found |= {rest.partition("/")[0], "examples"}
        elif top == "docs":
            found.add("examples")
        elif not is_without_effect(file):
            found |= {SHARED, "examples"}
    return frozenset(found)


def is_without_effect(file: str) -> bool:
    """Whether no package's test can see the file: prose, numbers, tests that always run in full."""
    is_read = file.endswith(".md") or NUMBERS.fullmatch(file)
    return bool(is_read) or file.startswith(("ci/tests/", "shared_csrc/tests/"))


def changed_files(root: Path, base: str | None) -> list[str]:
    if git(root, "rev-parse", "--is-shallow-repository") != "false":
        raise LookupError("a shallow clone")
    if not base:
        before = int(git(root, "log", "-1", "--format=%ct")) - LATELY
        base = git(root, "log", "-1", "--format=%H", f"--before={before}")
    if not base:
        raise LookupError("no commit is older")
    git(root, "merge-base", "--is-ancestor", base, "HEAD")
    tracked = git(root, "diff", "--name-only", "--no-renames", "-z", base, "--")
    new = git(root, "ls-files", "-z", "--others", "--exclude-standard")
    return [name for name in f"{tracked}\0{new}".split("\0") if name]


def git(root: Path, *words: str) -> str:
    command = ["git", *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()
