"""What sources include of ours, by their text."""

from __future__ import annotations

import re
from pathlib import Path

from .toolchain import INCLUDE

_INCLUDED = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)


def _is_of_torch(path: Path) -> bool:
    return path.is_relative_to(INCLUDE / "apex" / "torch")


def includes(file: Path) -> list[Path]:
    """The files that a file includes itself, in their order, as far as they are ours."""
    found = []
    for name in _INCLUDED.findall(file.read_text()):
        path = next((p for p in (file.parent / name, INCLUDE / name) if p.is_file()), None)
        found += [path.resolve()] if path else []
    return found


def included(file: Path) -> set[Path]:
    """The files that a file includes, directly or not, as far as they are ours."""
    seen: set[Path] = set()
    todo = [file]
    while todo:
        new = [path for path in includes(todo.pop()) if path not in seen]
        seen.update(new)
        todo += new
    return seen


def without_torch(file: Path) -> list[Path]:
    """What a file includes, in its order, that needs no torch; of what does, what it includes."""
    found: dict[Path, None] = {}
    for path in includes(file):
        if any(_is_of_torch(each) for each in (path, *included(path))):
            found |= dict.fromkeys([] if _is_of_torch(path) else without_torch(path))
        else:
            found[path] = None
    return list(found)
