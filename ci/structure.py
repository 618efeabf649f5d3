"""House rules on the packages' structure: sizes of op folders, names, who asks torch what, cycles.

Exceptions stand in ci/accepted_ops.toml, each with its reason; one that is no longer needed is a
complaint too. Each rule takes the files and its accepted exceptions, and yields its complaints.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ci.workspace import tomllib

MAX_OP_FILES = 6
MAX_OP_LINES = 400
SOURCES = {".py", ".h", ".cpp"}
# What torch asks of an op is answered once, in shared_csrc/native.
ASKED_BY_TORCH = re.compile(
    r"\b(autograd\.Function\b|register_vmap|register_decomposition|forward_ad|_functorch"
    r"|distributed\.tensor)"
)
TWIN_LINES = 6  # shorter functions may be alike by chance
VAGUE = {"base", "common", "helpers", "misc", "utils"}


def structure(root: Path, files: list[Path]) -> Iterator[str]:
    """Apply every rule of this file, with the exceptions of ci/accepted_ops.toml."""
    accepted = tomllib.loads((root / "ci" / "accepted_ops.toml").read_text())
    for kind, entries in accepted.items():
        for entry in entries:
            if not entry.get("reason"):
                yield f"ci/accepted_ops.toml: a {kind} has no reason: {entry}"
    sources = [f for f in files if f.suffix in SOURCES]
    yield from large_ops(root, sources, accepted.get("large", []))
    yield from torch_names(root, sources, accepted.get("torch", []))
    yield from vague_names(root, sources, accepted.get("name", []))
    yield from import_cycles(root, sources, accepted.get("cycle", []))
    yield from unchecked_formulas(root, sources, [])
    yield from twin_functions(root, sources, accepted.get("twins", []))


def large_ops(root: Path, files: list[Path], accepted: list[dict]) -> Iterator[str]:
    """An op folder has at most 6 files and 400 lines; an exception names its own limits."""
    limits = {entry["path"]: entry for entry in accepted}
    for folder in sorted({f.parent for f in files if f.suffix == ".cpp" and is_op(root, f)}):
        name = folder.relative_to(root).as_posix()
        inside = [f for f in files if f.is_relative_to(folder)]
        lines = sum(len(f.read_text().splitlines()) for f in inside)
        entry = limits.pop(name, {})
        if len(inside) <= MAX_OP_FILES and lines <= MAX_OP_LINES:
            if entry:
                yield f"{name}: ci/accepted_ops.toml need not accept it any more"
            continue
        most = entry.get("files", MAX_OP_FILES), entry.get("lines", MAX_OP_LINES)
        if len(inside) > most[0] or lines > most[1]:
            yield f"{name}: {len(inside)} files, {lines} lines; at most {most[0]} and {most[1]}"
    yield from (f"{name}: ci/accepted_ops.toml accepts it, but it is no op" for name in limits)


def is_op(root: Path, source: Path) -> bool:
    parts = source.relative_to(root).parts
    return parts[0] == "packages" and parts[2] == "src" and source.stem == source.parent.name


def torch_names(root: Path, files: list[Path], accepted: list[dict]) -> Iterator[str]:
    """Only shared_csrc/native answers torch's questions to an op."""
    excepted = {(entry["path"], name): False for entry in accepted for name in entry["names"]}
    for file in files:
        path = file.relative_to(root)
        if file.suffix != ".py" or path.parts[0] != "packages" or path.parts[2] != "src":
            continue
        words = "\n".join(dotted_names(ast.parse(file.read_text())))
        for name in sorted(set(ASKED_BY_TORCH.findall(words))):
            if (path.as_posix(), name) in excepted:
                excepted[path.as_posix(), name] = True
            else:
                yield f"{path}: names {name}, which belongs in shared_csrc/native"
    for (path, name), is_needed in excepted.items():
        if not is_needed:
            yield f"{path}: ci/accepted_ops.toml accepts {name}, which it does not name any more"


def dotted_names(tree: ast.Module) -> Iterator[str]:
    """Yield what code names: imports, attributes, and texts of one word; not docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and " " not in str(node.value):
            yield str(node.value)


def vague_names(root: Path, files: list[Path], accepted: list[dict]) -> Iterator[str]:
    """A file's name says what it holds: not base, common, helpers, misc or utils."""
    found = {f.relative_to(root).as_posix() for f in files if f.stem.strip("_") in VAGUE}
    excepted = {entry["path"] for entry in accepted}
    yield from (f"{path}: the name does not say what it holds" for path in sorted(found - excepted))
    for path in sorted(excepted - found):
        yield f"{path}: ci/accepted_ops.toml accepts its name, but there is no such file"


def import_cycles(root: Path, files: list[Path], accepted: list[dict]) -> Iterator[str]:
    """No modules import each other in a circle, not for type checking either.

    An import in a function does not count: it is how a module asks for another when it is called.
    """
    excepted = [set(entry["modules"]) for entry in accepted]
    graph = import_graph(root, files)
    reached = {module: reachable(graph, module) for module in graph}
    cycles = {frozenset({m, *(o for o in reached[m] if m in reached[o])}) for m in graph}
    cycles = [set(cycle) for cycle in cycles if len(cycle) > 1]
    for cycle in sorted(cycles, key=sorted):
        if not any(cycle <= entry for entry in excepted):
            yield f"{sorted(cycle)[0]}: an import cycle of {', '.join(sorted(cycle))}"
    for entry in excepted:
        if not any(cycle <= entry for cycle in cycles):
            yield f"ci/accepted_ops.toml: the cycle of {min(entry)} is gone; delete its entry"
        for module in sorted(entry - set().union(*(c for c in cycles if c <= entry))):
            if any(cycle <= entry for cycle in cycles):
                yield f"ci/accepted_ops.toml: {module} is in no cycle any more; delete it"


def import_graph(root: Path, files: list[Path]) -> dict[str, set[str]]:
    """Return which modules of the packages and of native/ each of them imports at its top."""
    modules = {}
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        is_shared = parts[:2] == ("shared_csrc", "native")
        if file.suffix == ".py" and (is_shared or (parts[0] == "packages" and parts[2] == "src")):
            inside = parts[1:] if is_shared else parts[3:]
            modules.setdefault(".".join(p for p in inside if p != "__init__"), file)
    return {name: imported(name, file, set(modules)) for name, file in modules.items()}


def at_top(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes outside functions, `if TYPE_CHECKING` included."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from at_top(node)


def imported(name: str, file: Path, modules: set[str], nodes: Callable = at_top) -> set[str]:
    package = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
    found = set()
    for node in nodes(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            deeper = {f"{source}.{alias.name}" for alias in node.names}
            found |= {inner if inner in modules else source for inner in deeper}
    return (found & modules) - {name}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, ahead = set(), [start]
    while ahead:
        for module in graph[ahead.pop()] - found:
            found.add(module)
            ahead.append(module)
    return found


def unchecked_formulas(root: Path, files: list[Path], _: list[dict]) -> Iterator[str]:
    """Each Formula has a test of its package with ``CHECKS`` and ``check_sharded``, which names its
    forward operator.
    """
    for file in files:
        path = file.relative_to(root)
        if file.suffix != ".py" or path.parts[0] != "packages" or path.parts[2] != "src":
            continue
        tests = [
            f.read_text() for f in files if f.is_relative_to(root / path.parents[-3] / "tests")
        ]
        tests = [text for text in tests if "CHECKS" in text and "check_sharded" in text]
        for call in ast.walk(ast.parse(file.read_text())):
            if not (
                isinstance(call, ast.Call)
                and ast.unparse(call.func).rpartition(".")[2] == "Formula"
            ):
                continue
            named = {keyword.arg: keyword.value for keyword in call.keywords}
            operator = ast.unparse(named.get("forward") or call.args[1]).rpartition(".")[2]
            if not any(re.search(rf"\b{operator}\b", text) for text in tests):
                yield (
                    f"{path}:{call.lineno}: no test of {path.parts[1]} runs CHECKS and "
                    f"check_sharded of apex_testkit.formulas on the Formula of {operator}"
                )


def twin_functions(root: Path, files: list[Path], accepted: list[dict]) -> Iterator[str]:
    """No function of the same body stands in two folders: a third op would copy it again."""
    found: dict[str, dict[Path, str]] = {}
    whole = {f.read_text(): f for f in files if f.suffix == ".py"}  # of equal files one: apex's own
    for text, file in whole.items():
        if "template" not in file.relative_to(root).parts:
            for function in ast.walk(ast.parse(text)):
                if isinstance(function, ast.FunctionDef):
                    body = function.body[ast.get_docstring(function) is not None :]
                    code = "\n".join(map(ast.unparse, body))
                    if code.count("\n") + 1 >= TWIN_LINES:
                        found.setdefault(code, {})[file.relative_to(root).parent] = function.name
    excepted = {entry["name"] for entry in accepted}
    for folders in found.values():
        names = set(folders.values())
        if len(folders) > 1 and not names & excepted:
            where = ", ".join(sorted(map(str, folders)))
            yield f"{min(names)}() has the same body in {where}"
        elif len(folders) > 1:
            excepted -= names
    yield from (f"ci/accepted_ops.toml: {name}() has no twin any more" for name in excepted)
