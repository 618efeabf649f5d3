"""Each rule on the packages' structure catches its fault, and each exception must be needed."""

import pytest

from ci import statements, structure

OP = "packages/apex-amp/src/apex/amp/scale"


@pytest.fixture
def check(tmp_path):
    """Run a rule on a tree of files, with exceptions; return what it says."""

    def run(rule, texts, *accepted):
        for name, text in texts.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return list(rule(tmp_path, sorted(tmp_path / name for name in texts), list(accepted)))

    return run


def op(*, files=1, lines=1):
    return {f"{OP}/scale.cpp": "//\n" * lines, **{f"{OP}/f{i}.py": "" for i in range(files - 1)}}


def test_large_ops(check):
    assert check(structure.large_ops, op(files=6, lines=400)) == []
    (complaint,) = check(structure.large_ops, op(files=6, lines=401))
    assert complaint == f"{OP}: 6 files, 401 lines; at most 6 and 400"
    accepted = {"path": OP, "lines": 401}
    assert check(structure.large_ops, op(lines=401), accepted) == []
    (complaint,) = check(structure.large_ops, op(files=7, lines=401), accepted)
    assert "7 files" in complaint


def test_large_ops_count_subfolders_and_ops_alone(check):
    (complaint,) = check(structure.large_ops, op() | {f"{OP}/inner/x.py": "\n" * 400})
    assert "2 files, 401 lines" in complaint
    assert check(structure.large_ops, {"packages/apex-amp/tests/x/x.cpp": "//\n" * 401}) == []


def test_large_op_exceptions_must_be_needed(check):
    (complaint,) = check(structure.large_ops, op(), {"path": OP, "lines": 401})
    assert "need not accept" in complaint
    (complaint,) = check(structure.large_ops, {}, {"path": OP})
    assert "it is no op" in complaint


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("class F(torch.autograd.Function): pass", "autograd.Function"),
        ("from torch.autograd import Function", "autograd.Function"),
        ("from torch.distributed.tensor import DTensor", "distributed.tensor"),
        ("sys.modules.get('torch.distributed.tensor')", "distributed.tensor"),
        ("import torch.autograd.forward_ad as fwad", "forward_ad"),
        ("torch._C._functorch.peek()", "_functorch"),
        ("torch.library.register_vmap(f)", "register_vmap"),
        ("from torch._decomp import register_decomposition", "register_decomposition"),
        ('"""Replaces an autograd.Function."""', None),
        ("x = 1  # forward_ad", None),
        ("from torch.autograd import FunctionCtx", None),
    ],
)
def test_torch_names(check, text, name):
    path = f"{OP}/ops.py"
    found = check(structure.torch_names, {path: text})
    assert found == ([f"{path}: names {name}, which belongs in shared_csrc/native"] if name else [])
    assert check(structure.torch_names, {"shared_csrc/native/formula.py": text}) == []
    entry = {"path": path, "names": [name or "forward_ad"]}
    found = check(structure.torch_names, {path: text}, entry)
    assert bool(found) == (name is None)  # an exception that is not needed


def test_vague_names(check):
    path = "packages/apex-amp/src/apex/amp/_base.py"
    (complaint,) = check(structure.vague_names, {path: "", "ci/based.py": ""})
    assert complaint.startswith(path)
    assert check(structure.vague_names, {path: ""}, {"path": path}) == []
    (complaint,) = check(structure.vague_names, {}, {"path": path})
    assert "no such file" in complaint


SRC = "packages/apex-amp/src/apex"


@pytest.mark.parametrize(
    ("back", "is_cycle"),
    [
        ("from . import a", True),
        ("from .a import f", True),
        ("from apex.a import f", True),
        ("import apex.a", True),
        ("if TYPE_CHECKING:\n    from .a import f", True),
        ("def f():\n    from . import a", False),
        ("from .c import a", False),
    ],
)
def test_import_cycles(check, back, is_cycle):
    texts = {f"{SRC}/a.py": "from .b import g", f"{SRC}/b.py": back, f"{SRC}/c.py": ""}
    found = check(structure.import_cycles, texts)
    assert found == (["apex.a: an import cycle of apex.a, apex.b"] if is_cycle else [])
    entry = {"modules": ["apex.a", "apex.b"]}
    (*complaints,) = check(structure.import_cycles, texts, entry)
    assert bool(complaints) != is_cycle
    if is_cycle:
        wider = {"modules": ["apex.a", "apex.b", "apex.c"]}
        (complaint,) = check(structure.import_cycles, texts, wider)
        assert "apex.c is in no cycle" in complaint


def test_every_exception_has_a_reason(tmp_path):
    (tmp_path / "ci").mkdir()
    file = tmp_path / "ci" / "accepted_ops.toml"
    file.write_text('[[name]]\npath = "ci/utils.py"\n')
    (tmp_path / "ci" / "utils.py").write_text("")
    (complaint,) = structure.structure(tmp_path, [tmp_path / "ci" / "utils.py"])
    assert "has no reason" in complaint


FORMULA = "_f = Formula('my_op', ops.my_op_forward, ops.my_op_backward, _reference, rows={})"
CHECKED = "from apex_testkit.formulas import CHECKS, check_sharded\nCase(my_op, (my_op_forward,))"


def test_formulas_are_checked(check):
    files = {"packages/apex-amp/src/apex/amp/my_op/__init__.py": FORMULA}
    test = "packages/apex-amp/tests/test_my_op.py"
    assert check(structure.unchecked_formulas, files | {test: CHECKED}) == []
    for text in ("", CHECKED.replace("CHECKS", "Case"), CHECKED.replace("my_op_f", "other_f")):
        (complaint,) = check(structure.unchecked_formulas, files | {test: text})
        assert "__init__.py:1: no test of apex-amp runs CHECKS" in complaint
        assert complaint.endswith("on the Formula of my_op_forward")
    for spelled in (
        FORMULA.replace("Formula(", "formula.Formula("),
        "_f = Formula(name='my_op', forward=ops.my_op_forward)",
    ):
        named = dict.fromkeys(files, spelled)
        assert check(structure.unchecked_formulas, named | {test: CHECKED}) == []
        assert len(check(structure.unchecked_formulas, named | {test: ""})) == 1
    elsewhere = {test.replace("apex-amp", "apex-contrib"): CHECKED, test: ""}
    assert check(structure.unchecked_formulas, files | elsewhere) != []


TWIN = """
def {}(x):
    {}
    for y in x:
        a = y
        b = a
        c = b
    print(a)
    return c
"""


def test_twin_functions(check):
    first, second = TWIN.format("f", '"One."'), TWIN.format("g", '"Two."')
    (complaint,) = check(structure.twin_functions, {"a/x.py": first, "b/y.py": second})
    assert complaint == "f() has the same body in a, b"
    accepted = {"name": "f", "reason": "one"}
    assert check(structure.twin_functions, {"a/x.py": first, "b/y.py": second}, accepted) == []
    for files in (
        {"a/x.py": first, "a/y.py": second},  # one folder
        {"a/x.py": first, "b/x.py": first},  # the same file, shipped twice
        {"a/x.py": first, "b/y.py": second.replace("c = b", "c = a")},
        {"a/x.py": "def f(x):\n    return x", "b/y.py": "def g(x):\n    return x"},
    ):
        assert check(structure.twin_functions, files) == []
        (complaint,) = check(structure.twin_functions, files, accepted)
        assert "f() has no twin any more" in complaint


def test_statements_are_counted_and_docstrings_are_not():
    text = '"""Module."""\nx = 1; y = 2\n\ndef f():\n    """Function."""\n'
    text += "    if x:\n        return y\n"
    assert statements.count(text) == 5  # two assignments, def, if, return
