"""No module of this wheel imports itself by way of others; imports for type checkers count, too."""

import ast
import graphlib
from importlib.util import resolve_name
from pathlib import Path

import pytest

import apex.amp

ROOT = Path(apex.amp.__file__).parents[2]
FOLDERS = ("apex/amp", "apex/fp16_utils", "apex/RNN")


def imported(name, file):
    """The names that a module's import statements mention, in full."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def graph(modules):
    """Module -> the modules that its imports run, the packages that it is not part of included."""
    result = {}
    for name, file in modules.items():
        parts = [full.split(".") for full in imported(name, file)]
        names = {".".join(part[:n]) for part in parts for n in range(1, len(part) + 1)}
        result[name] = {n for n in names & set(modules) if not f"{name}.".startswith(f"{n}.")}
    return result


def test_none():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    parts = [file.relative_to(ROOT).with_suffix("").parts for file in files]
    names = [".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts]
    modules = {n: f for n, f in zip(names, files, strict=True) if "_shared" not in f.parts}
    edges = graph(modules)
    assert {"apex.amp.masters.convert", "apex.amp"} <= edges["apex.fp16_utils.fp16util"]
    graphlib.TopologicalSorter(edges).prepare()


def test_one_is_found(tmp_path):
    texts = {
        "a": "from p import b",
        "b": "def f():\n    from .c import g",
        "c": "import p.a",
        "d": "",
    }
    modules = {f"p.{name}": tmp_path / f"{name}.py" for name in texts}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(graphlib.CycleError) as caught:
        graphlib.TopologicalSorter(graph(modules)).prepare()
    assert set(caught.value.args[1]) == {"p.a", "p.b", "p.c"}
