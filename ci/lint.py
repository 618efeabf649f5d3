"""The house rules that no ready-made linter knows; `nox -s lint` runs this.

Each rule is a function that yields its complaints, every one beginning with a file's path.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ci import metadata, supported
from ci.structure import structure
from ci.workspace import MATRIX, PACKAGES, ROOT, files

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 40

# All that the top folder holds, beside dotfiles.
TOP_LEVEL = {"LICENSE", "README.md", "ci", "docs", "noxfile.py", "packages", "shared_csrc"}

# Who may include what: the three tiers of shared_csrc/README.md, one direction.
MAY_INCLUDE = {
    "core": {"core"},
    "engine": {"core", "engine"},
    "math": {"core", "math"},
    "torch": {"core", "torch"},
    "op header": {"core", "math"},
}
TORCH_TIERS = {"torch", "op source"}
INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', re.MULTILINE)

# torch's functions that give a tensor's address, of the C++ classes and of the C interface.
POINTER = re.compile(r"\w*data_ptr\w*")
MAY_ASK_FOR_POINTERS = {
    "shared_csrc/include/apex/torch/check.h",
    "shared_csrc/include/apex/torch/tensor_list.h",
    "shared_csrc/emulation/tensors.cpp",
}

# Paths that exist on one machine only.
MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:w[o]rk|r[o]ot|home|opt|tmp|Users)/[\w.]")
TEXT_SUFFIXES = {".py", ".h", ".cpp", ".md", ".toml", ".ini", ".yml", ".yaml", ".json", ""}


def main() -> int:
    rules = (
        top_level,
        include_tiers,
        checked_pointers,
        identical_copies,
        long_files,
        long_functions,
        machine_paths,
        documented_commands,
        pinned_hooks,
        packages_structure,
        supported_versions,
        published_metadata,
    )
    complaints = [complaint for rule in rules for complaint in rule(ROOT)]
    print("\n".join(complaints))
    print(f"house rules: {len(complaints)} complaints")
    return 1 if complaints else 0


def top_level(root: Path) -> Iterator[str]:
    for name in sorted({file.relative_to(root).parts[0] for file in files()}):
        if name not in TOP_LEVEL and not name.startswith("."):
            yield f"{name}: does not belong into the top folder"


def include_tiers(root: Path) -> Iterator[str]:
    """A file may include only the tiers below it, and only torch/ and op sources see torch."""
    for file in files("*.h", "*.cpp"):
        tier = tier_of(file.relative_to(root))
        for name in INCLUDE.findall(file.read_text()) if tier else ():
            folder = name.split("/")[1] if name.startswith("apex/") else None
            allowed = MAY_INCLUDE.get(tier)
            if folder and allowed and folder not in allowed:
                yield f"{file.relative_to(root)}: {tier} must not include {name}"
            if name.startswith(("torch/", "ATen/", "c10/")) and tier not in TORCH_TIERS:
                yield f"{file.relative_to(root)}: {tier} must not include torch ({name})"


def checked_pointers(root: Path) -> Iterator[str]:
    """Only the headers that check a tensor's memory, and tools that stand in for torch, ask for it.

    A pointer from anywhere else may lead behind freed storage: torch adds an offset to whatever is
    there.
    """
    for file in files("*.h", "*.cpp"):
        path = file.relative_to(root)
        if path.as_posix() in MAY_ASK_FOR_POINTERS:
            continue
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            for name in POINTER.findall(line.partition("//")[0]):
                yield f"{path}:{number}: names {name}; use data() or operand() of torch/dispatch.h"


def tier_of(path: Path) -> str | None:
    """Return the tier of a source file; None for tests and tools, which may include anything."""
    parts = path.parts
    if parts[:3] == ("shared_csrc", "include", "apex"):
        return parts[3]
    if parts[0] == "packages" and parts[2] == "src":
        # Where several sources register the ops of a folder, this header is a part of all of them.
        is_source = path.suffix == ".cpp" or path.name == "registration.h"
        return "op source" if is_source else "op header"
    return None


def identical_copies(root: Path) -> Iterator[str]:
    """Files that every package carries are the same in all, byte for byte."""
    for name in ("hatch_build.py", "LICENSE"):
        copies = [root / "packages" / package / name for package in PACKAGES]
        first = (root / "LICENSE" if name == "LICENSE" else copies[0]).read_bytes()
        for copy in copies:
            if not copy.is_file() or copy.read_bytes() != first:
                yield f"{copy.relative_to(root)}: is not the same in all five packages"


def long_files(root: Path) -> Iterator[str]:
    for file in files("*.py", "*.h", "*.cpp"):
        lines = len(file.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            yield f"{file.relative_to(root)}: {lines} lines, more than {MAX_FILE_LINES}"


def long_functions(root: Path) -> Iterator[str]:
    """Lines of code count; a docstring does not."""
    for file in files("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body else 0
            if lines > MAX_FUNCTION_LINES:
                where = f"{file.relative_to(root)}:{node.lineno}"
                yield f"{where}: {node.name}() has {lines} lines, more than {MAX_FUNCTION_LINES}"


def machine_paths(root: Path) -> Iterator[str]:
    for file in files():
        if file.suffix not in TEXT_SUFFIXES:
            continue
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            if MACHINE_PATH.search(line):
                yield f"{file.relative_to(root)}:{number}: path of one machine: {line.strip()[:80]}"


def documented_commands(root: Path) -> Iterator[str]:
    """Sessions that documents name exist, and .ci/run sets up and tests as the README says."""
    sessions = set(re.findall(r"^@nox.session.*?^def (\w+)", noxfile(root), re.M | re.S))
    for file in files("*.md", ".ci/run", "*.yml"):
        for name in re.findall(r"nox -s \"?(\w+)", file.read_text()):
            if name not in sessions:
                yield f"{file.relative_to(root)}: there is no nox session {name}"
    readme = (root / "README.md").read_text() if (root / "README.md").is_file() else ""
    tests = re.search(r"^.*nox -s tests$", readme, re.M)
    if tests is None:
        yield "README.md: has no line that ends in `nox -s tests`, the command that tests"
    elif tests[0].strip() not in (root / ".ci" / "run").read_text():
        yield f".ci/run: does not run the README's test command, `{tests[0].strip()}`"


def noxfile(root: Path) -> str:
    return (root / "noxfile.py").read_text()


def packages_structure(root: Path) -> Iterator[str]:
    """See ci/structure.py."""
    yield from structure(root, files())


def supported_versions(root: Path) -> Iterator[str]:
    """See ci/supported.py."""
    yield from supported.complaints(root)


def published_metadata(root: Path) -> Iterator[str]:
    """See ci/metadata.py."""
    yield from metadata.complaints(root)


def pinned_hooks(root: Path) -> Iterator[str]:
    """pre-commit uses the tools' versions of ci/matrix.toml."""
    hooks = (root / ".pre-commit-config.yaml").read_text()
    for tool, version in MATRIX["tools"].items():
        if f"{tool}=={version}" not in hooks:
            yield f".pre-commit-config.yaml: does not use {tool}=={version} as ci/matrix.toml does"


if __name__ == "__main__":
    sys.exit(main())
