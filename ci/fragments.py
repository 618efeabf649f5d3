"""Names changes that users would not read of: `python ci/fragments.py BASE`.

What a branch changes under ``packages/<p>/src`` needs a new fragment in ``packages/<p>/changes``,
and what it changes of the shared kernels one in ``shared_csrc/changes``, which also tells what
packages changed for their sake. A change that no user can notice has the label `no-fragment`.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ci.dirty import git
from ci.workspace import ROOT, files

# As ci/towncrier.toml has them; the name is the number of an issue, or begins with "+".
FRAGMENT = re.compile(r"(?:\d+|\+[\w.-]+?)\.(?:fixed|added|changed|removed)\.md")
SOURCES = re.compile(r"(packages/[^/]+)/src/|(shared_csrc)/(?:include|native)/")
SHARED = "shared_csrc"


def main(base: str) -> int:
    changed = git(ROOT, "diff", "--name-status", "--no-renames", "-z", f"{base}...HEAD", "--")
    words = changed.split("\0")
    found = [*untold(dict(zip(words[1::2], words[::2], strict=False))), *misnamed()]
    print("\n".join([*found, f"fragments: {len(found)} complaints"]))
    return 1 if found else 0


def untold(changes: dict[str, str]) -> Iterator[str]:
    """Yield a complaint for each part that changed without saying so.

    Args:
        changes: what git says of each file: A for a new one, M, D, ...
    """
    parts = {match[1] or match[2] for file in changes if (match := SOURCES.match(file))}
    told = {
        file.partition("/changes/")[0]
        for file, how in changes.items()
        if how in ("A", "M") and "/changes/" in file and FRAGMENT.fullmatch(Path(file).name)
    }
    for part in sorted(parts - told):
        if SHARED in parts & told and part != SHARED:
            continue
        example = f"{part}/changes/+what.fixed.md"
        yield f"{part}: changed, and no fragment tells its users; write one, such as {example}"


def misnamed() -> Iterator[str]:
    """Yield the fragments that no release would take."""
    for file in files("packages/*/changes/*", "shared_csrc/changes/*"):
        if not FRAGMENT.fullmatch(file.name):
            yield f"{file.relative_to(ROOT)}: expected a name like 12.fixed.md or +what.added.md"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
