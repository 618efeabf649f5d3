"""Which files reach what changed: those that import it, directly or not, in functions too.

C++ counts as the modules beside it. A module that a text names counts as imported, because tests
hand code to other processes as text; but not by apex/__init__.py, which names all.
"""

import ast
import functools
import re
from pathlib import PurePosixPath

from ci import structure
from ci.workspace import ROOT, files

_FOLDERS = ("packages", "ci/testkit", "ci/tests", "shared_csrc/tests", "docs/examples")
_WORD = re.compile(r"\w+(?:\.\w+)*")


def reached(changed: list[str]) -> frozenset[str]:
    """Return the Python files that reach the changed files, these included.

    Raises:
        LookupError: a file is neither a module nor beside one, and may matter to any test.
    """
    found, ahead = set(), [module for file in changed for module in _modules_of(file)]
    while ahead:
        file = ahead.pop()
        if file not in found:
            found.add(file)
            ahead += _users().get(_modules()[file], ())
    return frozenset(found)


def is_test(file: str) -> bool:
    return PurePosixPath(file).name.startswith("test_")


def _modules_of(file: str) -> list[str]:
    path = PurePosixPath(file)
    if path.suffix in (".cpp", ".h"):
        found = [other for other in _modules() if PurePosixPath(other).parent == path.parent]
        if path.parts[0] != "packages":  # a program of some of the tests beside it
            named = re.compile(rf"\b{path.stem}\b")
            found = [test for test in found if named.search((ROOT / test).read_text())] or found
    else:
        found = [file] if file in _modules() and path.name != "conftest.py" else []
    if not found or any(_modules()[each] == "apex" for each in found):
        raise LookupError(f"{file} may matter to any test")
    return found


@functools.cache
def _modules() -> dict[str, str]:
    """Return the file of every module, with the name that others import it by."""
    found = {}
    for file in files(*_FOLDERS):
        path = file.relative_to(ROOT)
        if path.suffix != ".py":
            continue
        parts, start = path.with_suffix("").parts, -1
        if parts[0] == "packages" and parts[2] == "src":
            start = 3
        elif parts[:2] == ("ci", "testkit"):
            start = 2
        elif parts[0] == "docs":
            start = 0  # a script, whose neighbours have names that other examples have, too
        found[path.as_posix()] = ".".join(p for p in parts[start:] if p != "__init__")
    return found


@functools.cache
def _users() -> dict[str, set[str]]:
    """Return, of every module, the files that import it or name it in a text."""
    names, found = {*_modules().values()} - {"apex"}, {}
    for file, name in _modules().items():
        if name == "apex":
            continue
        tree = ast.parse((ROOT / file).read_text())
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        named = {w for t in texts if isinstance(t, str) for w in _WORD.findall(t)} & names
        for used in named | structure.imported(name, ROOT / file, names, ast.walk):
            for module in _with_parents(used) & names:
                found.setdefault(module, set()).add(file)
    return found


def _with_parents(module: str) -> set[str]:
    """Return the module and the packages that are imported before it."""
    parts = module.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
