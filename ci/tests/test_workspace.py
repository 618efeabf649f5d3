"""Which ops a command names, and which tests belong to them."""

import json
import subprocess
import sys

import pytest

from ci import emulate, kernels, workspace


def listed(*options):
    command = [sys.executable, "-m", "nox", "-l", *options]
    run = subprocess.run(command, cwd=workspace.ROOT, capture_output=True, text=True, check=True)
    return run.stdout


def test_sessions_are_listed_by_family_and_by_name():
    lines = [line for line in listed().splitlines() if line[:2] in ("* ", "- ")]
    names = [line.split()[1] for line in lines]
    assert len(names) == len(set(names)) < 25
    sessions = [each["session"] for each in json.loads(listed("--json", "-s", *names))]
    assert {session.partition("(")[0] for session in sessions} == set(names)
    assert "tests(together)" in sessions
    assert any("apex-parallel, together)" in line for line in lines)


def test_every_op_is_known_with_its_package():
    found = workspace.ops()
    assert found["fused_adam"] == "apex-optimizers"
    named = {op.name: package.replace(".", "-") for package, op in emulate.all_ops()}
    assert found == named


def test_ops_come_before_paths_and_options():
    words = ["fused_sgd", "syncbn", "packages/apex-amp/tests", "-k", "fused_adam"]
    assert workspace.leading_ops(words) == (words[:2], words[2:])
    assert workspace.leading_ops(["-k", "adam"]) == ([], ["-k", "adam"])


def test_an_unknown_op_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"there is no op adam; .*fused_adam,"):
        workspace.leading_ops(["fused_sgd", "adam"])


def test_tests_of_an_op():
    tests = workspace.op_tests("fused_sgd")
    assert "packages/apex-optimizers/tests/test_fused_sgd.py" in tests
    assert all("/test_fused_sgd" in test for test in tests)
    # Without a file of its name: those that mention it.
    assert "packages/apex-optimizers/tests/test_amp_C.py" in workspace.op_tests(
        "multi_tensor_axpby"
    )


def test_emulate_runs_the_tests_of_the_named_ops_or_what_pytest_is_told():
    assert emulate.chosen_tests(["syncbn"], ["-k", "x"]) == workspace.op_tests("syncbn")
    assert emulate.chosen_tests([], ["packages/apex-amp/tests"]) == []
    assert len(emulate.chosen_tests([], [])) == len(workspace.PACKAGES)


def test_kernels_of_named_ops_alone():
    ops = [op for _, op in emulate.all_ops()]
    assert [op.name for op in kernels.chosen(ops, ["syncbn"])] == ["syncbn"]
    assert kernels.chosen(ops, []) == ops
