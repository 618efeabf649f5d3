"""The scaffold of an op: it compiles, registers, and fails for want of an oracle alone."""

import os
import re
import subprocess
import sys

import pytest
from environments import PACKAGES, copy_checkout

ORACLE = "    return x - x.mean(-1, keepdim=True)\n"
DERIVATIVES = {
    "test_gradient",
    "test_plain_gradient_is_the_kernels",
    "test_transforms",
    "test_forward_mode",
}
# Makes of the scaffold an op whose backward needs what its forward saves: x times centred x.
SAVING = {
    "return row_center_kernel(x.contiguous())": "return x * row_center_kernel(x.contiguous())",
    "return row_center_kernel(grad.contiguous())": (
        "return grad * row_center_kernel(x.contiguous()) + row_center_kernel(grad * x)"
    ),
    "return (wide - wide.mean(-1, keepdim=True)).to(x.dtype)": (
        "return (wide * (wide - wide.mean(-1, keepdim=True))).to(x.dtype)"
    ),
}


def new_op(checkout, *arguments, answers=""):
    return subprocess.run(
        [sys.executable, "ci/new_op.py", *arguments],
        cwd=checkout,
        input=answers,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def run_tests(checkout, file, cache, chosen="not tall"):
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-k", chosen, str(file)]
    path = os.pathsep.join([str(checkout / "packages" / "apex-contrib" / "src"), str(checkout)])
    environment = os.environ | {"PYTHONPATH": path, "APEX_CACHE_DIR": str(cache)}
    environment.pop("APEX_JIT", None)
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    failed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.M)
    passed = re.findall(r"^PASSED \S+::(\w+)", done.stdout, re.M)
    return done.stdout, set(failed), set(passed)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkout with the op row_center, its test, and a cache of kernels."""
    folder = tmp_path_factory.mktemp("new_op")
    checkout = copy_checkout(folder / "checkout")
    link = checkout / "packages/apex-contrib/src/apex/contrib/_shared"
    link.symlink_to(checkout / "shared_csrc")  # as an editable install makes it
    done = new_op(checkout, "apex-contrib", "row_center")
    assert done.returncode == 0, done.stderr
    return checkout, checkout / "packages/apex-contrib/tests/test_row_center.py", folder / "cache"


@pytest.mark.builds
def test_exactly_the_oracle_is_missing(made):
    file = made[1]
    output, failed, passed = run_tests(*made)
    assert failed == {"test_matches_the_oracle"}, output
    others = DERIVATIVES | {"test_is_a_good_citizen_of_torch", "test_compiles", "test_bad_input"}
    assert passed == others, output
    reasons = set(re.findall(r"^FAILED .*? - (.*)$", output, re.M))
    assert all(reason.startswith("Failed: write the oracle") for reason in reasons)

    text = re.sub(r"    pytest\.fail\(.*\n", ORACLE, file.read_text())
    file.write_text(text)
    output, failed, passed = run_tests(*made)
    assert failed == set(), output
    assert passed == {*others, "test_matches_the_oracle"}


@pytest.mark.builds
def test_derivatives_of_an_op_that_saves_a_tensor(made):
    """They are right; and its own test notices where they are lost, as torch would in silence."""
    chosen = " or ".join(DERIVATIVES)
    code = made[0] / "packages/apex-contrib/src/apex/contrib/row_center/__init__.py"
    text = code.read_text()
    for old, new in SAVING.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    code.write_text(text)
    output, failed, passed = run_tests(*made, chosen)
    assert (failed, passed) == (set(), DERIVATIVES), output

    code.write_text(text.replace("if differentiated_again():", "if False:"))
    output, failed, _ = run_tests(*made, chosen)
    assert failed == {"test_gradient"}, output

    code.write_text(text.replace("if needs_plain() else", "if False else"))
    output, failed, _ = run_tests(*made, chosen)
    assert {"test_gradient", "test_transforms", "test_forward_mode"} <= failed, output


def test_it_asks_until_the_answers_make_sense(tmp_path):
    checkout = copy_checkout(tmp_path / "checkout")
    made = new_op(checkout, answers="contrib\napex-contrib\nRow Center\nclass\nrow_center\n")
    assert made.returncode == 0, made.stderr
    assert "the package must be one of apex-amp, " in made.stdout
    assert "lower case words joined by underscores; got 'Row Center'" in made.stdout
    assert "got 'class'" in made.stdout
    folder = checkout / "packages/apex-contrib"
    written = [
        "src/apex/contrib/row_center/row_center.h",
        "src/apex/contrib/row_center/row_center.cpp",
        "src/apex/contrib/row_center/__init__.py",
        "tests/test_row_center.py",
        "benchmarks/bench_row_center.py",
    ]
    for file in written:
        text = (folder / file).read_text()
        assert "row_center" in text
        assert "my_op" not in text
        assert "MyOp" not in text
        assert "my_package" not in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["contrib", "row_center"], "the package must be one of"),
        (["apex-contrib", "RowCenter"], "lower case words"),
        (["apex-optimizers", "fused_adam"], "is there already"),
        ([], "give the names"),
    ],
)
def test_bad_names_change_nothing(tmp_path, arguments, complaint):
    checkout = copy_checkout(tmp_path / "checkout")
    before = sorted((checkout / "packages").rglob("*"))
    made = new_op(checkout, *arguments)
    assert made.returncode != 0
    assert complaint in made.stderr
    assert sorted((checkout / "packages").rglob("*")) == before


def test_packages_are_found():
    assert len(PACKAGES) == 5
