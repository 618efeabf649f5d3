"""Apex's extension modules: functions and arguments of ci/tests/data/extension_modules.toml."""

import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

from ci.workspace import tomllib

ROOT = Path(__file__).resolve().parents[2]
TABLE = tomllib.loads((ROOT / "ci/tests/data/extension_modules.toml").read_text())
FUNCTIONS = [
    pytest.param(module, name, forms, id=f"{module}.{name}")
    for module, entry in TABLE.items()
    for name, forms in entry["functions"].items()
]


def test_every_module_is_in_the_table():
    there = {(f.parent.parent.name, f.stem) for f in ROOT.glob("packages/*/src/*.py")}
    assert there == {(entry["wheel"], module) for module, entry in TABLE.items()}
    rows = sorted(entry["row"] for entry in TABLE.values() if entry["row"])
    assert rows == list(range(1, 29)), "ROCm builds 28"


@pytest.mark.parametrize("module", TABLE)
def test_a_module_has_these_functions(module):
    """By ``import *``, and by looking: what a module makes itself and shows is in the table."""
    imported, wanted = importlib.import_module(module), set(TABLE[module]["functions"])
    assert set(imported.__all__) == wanted
    own = {
        name
        for name, value in vars(imported).items()
        if inspect.isfunction(value) and value.__module__ == module and not name.startswith("_")
    }
    assert own <= wanted
    for name in wanted:
        function = getattr(imported, name)
        assert callable(function)
        assert inspect.getdoc(function), f"{module}.{name} says nothing of itself"


def form_of(text):
    """Names of the arguments of a form, and the defaults of those that may be left out."""
    names, defaults = [], {}
    for word in text.split():
        name, has_default, default = word.partition("=")
        names.append(name.removesuffix("?"))
        if has_default:
            defaults[names[-1]] = {"False": False, "None": None, "0": 0}[default]
    return names, defaults


def accepts(function, count, signature):
    """Whether a function takes so many arguments by position."""
    try:
        bound = signature.bind(*[object()] * count)
    except TypeError:
        return False
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        try:  # it must say so itself, before it looks at any of them
            function(*bound.args)
        except Exception as error:
            return not (isinstance(error, TypeError) and re.search(r"arguments.* got", str(error)))
    return True


@pytest.mark.parametrize(("module", "name", "forms"), FUNCTIONS)
def test_a_function_takes_these_arguments(module, name, forms):
    function = getattr(importlib.import_module(module), name)
    signature = inspect.signature(function)
    counts = set()
    for names, defaults in map(form_of, [forms] if isinstance(forms, str) else forms):
        counts.update(range(len(names) - len(defaults), len(names) + 1))
        own = {key: p.default for key, p in signature.parameters.items()}
        assert {key: own.get(key, "is no argument") for key in defaults} == defaults
    takes = functools.partial(accepts, function, signature=signature)
    assert all(map(takes, counts)), f"takes {signature}"
    assert not takes(max(counts) + 1), f"takes more: {signature}"
    optional = sum(p.default is not p.empty for p in signature.parameters.values())
    assert not takes(min(counts) - 1) or optional or not min(counts), f"takes less: {signature}"


def test_a_wrong_number_of_arguments_is_found():
    """The test can fail."""

    def two(a, b=0): ...

    def some(*given):
        if len(given) != 3:
            raise TypeError(f"some: expected 3 arguments, got {len(given)}.")

    for function, right in ((two, {1, 2}), (some, {3})):
        signature = inspect.signature(function)
        assert {n for n in range(5) if accepts(function, n, signature)} == right
    assert form_of("a b? c=0") == (["a", "b", "c"], {"c": 0})


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL and peers are there")
@pytest.mark.parametrize(
    ("module", "name", "given", "error", "text"),
    [
        ("_apex_nccl_allocator", "get_nccl_allocator", (), RuntimeError, "needs a GPU, and torch"),
        ("_nccl_version", "get_nccl_version", (), RuntimeError, "built without NCCL"),
        ("nccl_p2p_cuda", "init_nccl_comm", (b"", 0, 1), RuntimeError, "is not initialized"),
        ("nccl_p2p_cuda", "get_unique_nccl_id", (0,), ValueError, "n must be positive, got 0"),
        ("peer_memory_cuda", "allocate_raw", (0,), ValueError, "size must be positive, got 0"),
        ("peer_memory_cuda", "free_raw", (12,), ValueError, "nothing was allocated at 0xc"),
        ("bnp", "get_remote_data_ptr", (None, 0), NotImplementedError, "torch.distributed"),
    ],
)
def test_what_a_cpu_lacks_is_said_when_it_is_called(module, name, given, error, text):
    with pytest.raises(error, match=text):
        getattr(importlib.import_module(module), name)(*given)
