"""Which files reach what changed: the import system agrees, and what is unknown is an error."""

import json
import sys

import pytest
from environments import ROOT, run

from ci import cover, reach
from ci.workspace import ops

TREE = {
    "packages/p/src/apex/__init__.py": "NAMES = ['apex.p.op', 'old_C']",
    "packages/p/src/apex/p/__init__.py": "",
    "packages/p/src/apex/p/op/__init__.py": "from . import ops",
    "packages/p/src/apex/p/op/ops.py": "",
    "packages/p/src/apex/p/user.py": "def f():\n    from .op.ops import step",
    "packages/p/src/apex/p/other.py": "",
    "packages/p/src/old_C.py": "import apex.p.user",
    "packages/p/tests/conftest.py": "",
    "packages/p/tests/test_op.py": "from apex.p import op",
    "packages/p/tests/test_user.py": "import apex.p.user as u",
    "packages/p/tests/test_text.py": "run('-c', 'import torch; import old_C')",
    "packages/p/tests/test_other.py": "import apex\nfrom apex.p.other import g",
    "ci/testkit/kit/model.py": "from apex.p import user",
    "ci/tests/test_kit.py": "from kit.model import f",
    "docs/examples/a/train.py": "import apex.p.user",
    "docs/examples/a/test_a.py": "",
}
OP = "packages/p/src/apex/p/op/op.cpp"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(reach, "ROOT", tmp_path)
    monkeypatch.setattr(reach, "files", lambda *_: [tmp_path / name for name in TREE])
    for cached in (reach._modules, reach._users):
        cached.cache_clear()
    yield
    for cached in (reach._modules, reach._users):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        (OP, {"other.py", "test_other.py", "test_a.py"}),
        ("packages/p/src/apex/p/user.py", {"ops.py", "test_op.py", "other.py"}),
        ("packages/p/src/apex/p/other.py", {"user.py", "test_user.py", "test_kit.py", "old_C.py"}),
        ("packages/p/tests/test_op.py", {"test_user.py", "test_other.py"}),
    ],
)
def test_who_reaches_what(tree, changed, missed):
    found = reach.reached([changed])
    names = {file.rpartition("/")[2] for file in found}
    assert not names & missed
    if changed == OP:
        wanted = {"user.py", "old_C.py", "model.py", "train.py"}
        wanted |= {f"test_{name}.py" for name in ("op", "user", "text", "kit")}
        assert wanted <= names
    assert reach.reached([]) == frozenset()


@pytest.mark.parametrize(
    "unknown",
    [
        "packages/p/pyproject.toml",
        "packages/p/tests/conftest.py",
        "packages/p/src/apex/__init__.py",
        "packages/p/src/apex/p/gone.py",
        "packages/p/src/apex/p/gone/gone.cpp",
    ],
)
def test_what_may_matter_to_any_test(tree, unknown):
    with pytest.raises(LookupError, match="may matter to any test"):
        reach.reached([OP, unknown])


def test_tests_of_an_op_s_name_reach_its_kernels():
    found = 0
    for op, folder in cover.op_folders().items():
        test = f"packages/{ops()[op]}/tests/test_{op}.py"
        if (ROOT / test).is_file():
            found += 1
            assert test in reach.reached([f"{folder.relative_to(ROOT)}/{op}.cpp"])
    assert found > 20


# Imports each file in a process of its own, forked after torch is imported, and prints the modules.
LOADED = """
import importlib.util, json, os, sys
import torch, pytest, apex_testkit.plugin
for file in sys.argv[1:]:
    if not os.fork():
        spec = importlib.util.spec_from_file_location("loaded", file)
        sys.path.insert(0, os.path.dirname(file))
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        print(json.dumps([file, [name for name in sys.modules if name.startswith("apex.")]]))
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, file
"""


def test_what_a_test_file_loads_it_reaches():
    tests = [
        file for file in reach._modules() if file.startswith("packages/") and reach.is_test(file)
    ]
    sources = {name: file for file, name in reach._modules().items() if "/src/" in file}
    kit = {"PYTHONPATH": str(ROOT / "ci" / "testkit")}
    done = run(sys.executable, "-c", LOADED, *tests[::16], env=kit)
    for line in done.stdout.splitlines():
        file, loaded = json.loads(line)
        own = {sources[name] for name in loaded if name in sources}
        assert own
        for source in own:
            assert file in reach.reached([source]), source
