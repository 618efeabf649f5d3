"""Every function of apex.contrib.sparsity that Apex has, with its arguments."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

LINES = (Path(__file__).parent / "data" / "sparsity_names.txt").read_text().splitlines()
FORMS = [line for line in LINES if not line.startswith("#")]


def arguments_of(form):
    """Names of arguments, and the defaults of those that have one; ``...`` is a list or a dict."""
    tree = ast.parse(f"def f({form}): ...").body[0].args
    names, values = [arg.arg for arg in tree.args], [ast.literal_eval(d) for d in tree.defaults]
    return names, dict(zip(names[len(names) - len(values) :], values, strict=True))


@pytest.mark.parametrize("line", FORMS)
def test_takes_the_arguments_of_apex(line):
    module, _, call = line.partition(":")
    name, form = call.removesuffix(")").split("(", 1)
    found = importlib.import_module(f"apex.contrib.sparsity.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    own = inspect.signature(found).parameters
    names, defaults = arguments_of(form)
    assert list(own)[: len(names)] == names, f"takes {inspect.signature(found)}"
    for key, default in defaults.items():
        assert own[key].default is not inspect.Parameter.empty
        if default is not ...:
            assert own[key].default == default
    others = list(own.values())[len(names) :]
    assert all(p.default is not p.empty for p in others), "Apex's callers do not give these"
    assert inspect.getdoc(found)
