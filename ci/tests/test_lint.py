"""The house rules catch what they are there to catch, and let pass what is right."""

import pytest

from ci import lint, metadata
from ci.workspace import MATRIX, PACKAGES, ROOT, tomllib

LONG_FUNCTION = "def f():\n" + "    pass\n" * 41
DOCUMENTED = 'def f():\n    """' + "\n    words\n" * 60 + '    """\n    return 1\n'
# Put together here, so that this file does not break the rule itself.
SOMEONES_FOLDER = "/" + "home/someone"


@pytest.fixture
def complaints(tmp_path, monkeypatch):
    """Run a rule on one file of the given name and text; return what it says."""

    def check(rule, name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        monkeypatch.setattr(lint, "files", lambda *patterns: [file])
        return list(rule(tmp_path))

    return check


@pytest.mark.parametrize(
    ("name", "include", "is_allowed"),
    [
        ("shared_csrc/include/apex/engine/a.h", '"apex/core/b.h"', True),
        ("shared_csrc/include/apex/core/a.h", '"apex/engine/b.h"', False),
        ("shared_csrc/include/apex/math/a.h", '"apex/engine/b.h"', False),
        ("shared_csrc/include/apex/math/a.h", "<torch/csrc/stable/tensor.h>", False),
        ("shared_csrc/include/apex/engine/a.h", "<cmath>", True),
        ("shared_csrc/include/apex/torch/a.h", "<torch/csrc/stable/tensor.h>", True),
        ("packages/apex-amp/src/apex/amp/scale/scale.h", '"apex/torch/check.h"', False),
        ("packages/apex-amp/src/apex/amp/scale/scale.h", '"apex/math/scale.h"', True),
        ("packages/apex-amp/src/apex/amp/scale/scale.cpp", '"apex/torch/check.h"', True),
        ("shared_csrc/tests/a.cpp", '"apex/torch/check.h"', True),
    ],
)
def test_include_tiers(complaints, name, include, is_allowed):
    found = complaints(lint.include_tiers, name, f"#pragma once\n#include {include}\n")
    assert (found == []) == is_allowed
    assert all(complaint.startswith(name) for complaint in found)


OP = "packages/apex-amp/src/apex/amp/scale/scale.cpp"


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        (OP, "float* x = static_cast<float*>(tensor.data_ptr());", ["data_ptr"]),
        (OP, "float* x = tensor.mutable_data_ptr<float>();", ["mutable_data_ptr"]),
        (OP, "auto* x = tensor->const_data_ptr();", ["const_data_ptr"]),
        (OP, "aoti_torch_get_data_ptr(tensor.get(), &x);", ["aoti_torch_get_data_ptr"]),
        ("shared_csrc/include/apex/engine/a.h", "x.data_ptr(), y.data_ptr()", ["data_ptr"] * 2),
        ("ci/template/op/my_op.cpp", "x.data_ptr()", ["data_ptr"]),
        ("shared_csrc/include/apex/torch/check.h", "return tensor.data_ptr();", []),
        (OP, "float* x = data<float>(tensor, name);  // not data_ptr()", []),
    ],
)
def test_pointers_come_from_the_check(complaints, name, line, said):
    found = complaints(lint.checked_pointers, name, f"// A line.\n{line}\n")
    assert [f"{name}:2: names {word}; use" in c for word, c in zip(said, found, strict=True)] == [
        True
    ] * len(said)


@pytest.mark.parametrize(
    ("name", "is_allowed"), [(".pytest.ini", True), ("ci/a.py", True), ("pytest.ini", False)]
)
def test_top_level(complaints, name, is_allowed):
    assert (complaints(lint.top_level, name, "") == []) == is_allowed


@pytest.mark.parametrize(
    ("rule", "text", "is_allowed"),
    [
        (lint.long_files, "x = 1\n" * 500, True),
        (lint.long_files, "x = 1\n" * 501, False),
        (lint.long_functions, LONG_FUNCTION, False),
        (lint.long_functions, DOCUMENTED, True),
        (lint.machine_paths, f"open('{SOMEONES_FOLDER}/data')\n", False),
        (lint.machine_paths, "open(Path.home() / 'data')\n# see ci/home/page\n", True),
    ],
)
def test_python_rules(complaints, rule, text, is_allowed):
    assert (complaints(rule, "module.py", text) == []) == is_allowed


HOME = MATRIX["home"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"[here]({HOME}) [page]({HOME}/blob/main/docs/index.md#any) [up](#top)", []),
        (f"[folder]({HOME}/tree/main/docs/guides) [paper](https://arxiv.org/abs/1)", []),
        ("[page](docs/index.md)", ["links to docs/index.md, which is not there"]),
        ("![plot](plot.png)", ["links to plot.png, which is not there"]),
        (
            f"[page]({HOME}/blob/main/docs/none.md)",
            [f"links to {HOME}/blob/main/docs/none.md"],
        ),
        (f"[page]({HOME}/wiki)", [f"links to {HOME}/wiki, which the repository does not have"]),
        ("see `docs/index.md`, or `apex/docs`", ["names `docs/index.md`, which readers"]),
    ],
)
def test_readmes_on_a_package_index(text, said):
    found = list(metadata.readme_complaints(text, ROOT))
    assert len(found) == len(said)
    assert all(complaint.startswith(start) for complaint, start in zip(found, said, strict=True))


@pytest.mark.parametrize("spoilt", ["urls", "classifiers", "requires-python", "license", None])
def test_metadata_of_a_package(spoilt):
    file = ROOT / "packages" / PACKAGES[0] / "pyproject.toml"
    project = tomllib.loads(file.read_text())["project"]
    if spoilt:
        project[spoilt] = {"urls": {}, "requires-python": ">=3"}.get(spoilt, [])
    assert len(list(metadata.project_complaints(project, PACKAGES[0]))) == bool(spoilt)


def test_the_repository_itself_obeys():
    rules = (lint.identical_copies, lint.pinned_hooks, lint.published_metadata)
    assert [c for rule in rules for c in rule(lint.ROOT)] == []
