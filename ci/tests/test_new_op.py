"""The scaffold of an op: it compiles, registers, and fails for want of an oracle alone."""

import os
import re
import subprocess
import sys

import pytest
from environments import PACKAGES, copy_checkout

ORACLE = "    return x * x.mean(-1, keepdim=True)\n"
# What a Formula asks before it calls kernels; without it torch gives zeros, or drops tangents.
GUARDS = {
    ":= differentiated_again()": ("gradients", ":= False", {"derivatives", "func"}),
    "if not kernels_serve():": ("formula", "if False:", {"forward_mode", "traced"}),
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
    failed = re.findall(r"^FAILED \S+::(\w+)(?:\[cpu-(\w+)\])?", done.stdout, re.M)
    passed = re.findall(r"^PASSED \S+::(\w+)", done.stdout, re.M)
    return done.stdout, {name if name != "test_formula" else of for name, of in failed}, set(passed)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkout with the op row_center, its test, and a cache of kernels."""
    folder = tmp_path_factory.mktemp("new_op")
    checkout = copy_checkout(folder / "checkout")
    sources, shared = checkout / "packages/apex-contrib/src/apex", checkout / "shared_csrc"
    (sources / "contrib/_shared").symlink_to(shared)  # as an editable install makes them
    (sources / "__init__.py").symlink_to(shared / "namespace/__init__.py")
    done = new_op(checkout, "apex-contrib", "row_center")
    assert done.returncode == 0, done.stderr
    return checkout, checkout / "packages/apex-contrib/tests/test_row_center.py", folder / "cache"


@pytest.mark.builds
def test_exactly_the_oracle_is_missing(made):
    file = made[1]
    output, failed, passed = run_tests(*made)
    assert "test_matches_the_oracle" in failed, output
    assert passed >= {"test_formula", "test_is_a_good_citizen_of_torch", "test_bad_input"}, output
    reasons = set(re.findall(r"^FAILED .*? - (.*)$", output, re.M))
    assert all("write the oracle" in reason for reason in reasons if "rank" not in reason), reasons

    text = re.sub(r"    pytest\.fail\(.*\n", ORACLE, file.read_text())
    file.write_text(text)
    output, failed, passed = run_tests(*made)
    assert failed == set(), output
    assert passed >= {"test_matches_the_oracle", "test_formula", "test_sharded"}


@pytest.mark.builds
@pytest.mark.parametrize("guard", GUARDS)
def test_lost_derivatives_are_noticed(made, guard):
    """By the op's own test, where torch itself loses them in silence."""
    file = made[1]
    file.write_text(re.sub(r"    pytest\.fail\(.*\n", ORACLE, file.read_text()))
    module, replacement, noticed = GUARDS[guard]
    code = made[0] / f"shared_csrc/native/{module}.py"
    text = code.read_text()
    assert text.count(guard) == 1
    code.write_text(text.replace(guard, replacement))
    output, failed, _ = run_tests(*made, "formula")
    code.write_text(text)
    assert noticed & failed, output


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
