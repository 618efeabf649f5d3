"""The sampling plugin runs every test function, and of each as many cases as it is told."""

import re
import sys

import pytest
from environments import ROOT, run

from ci.sampling import draw, is_in_share, parse_share, spread

MODULE = """
import pytest

@pytest.mark.parametrize("case", range(100))
def test_many(case):
    print("ran many", case)

def test_one():
    print("ran one")
"""


@pytest.mark.parametrize(
    ("count", "limit", "expected"),
    [
        (100, 4, [0, 33, 66, 99]),
        (5, 5, [0, 1, 2, 3, 4]),
        (3, 5, [0, 1, 2]),
        (9, 2, [0, 8]),
        (9, 1, [4]),
    ],
)
def test_spread(count, limit, expected):
    assert spread(list(range(count)), limit) == expected


def test_every_function_runs(tmp_path):
    (tmp_path / "test_module.py").write_text(MODULE)
    options = ["-p", "ci.sampling", "--cases-per-test", "3", "-p", "no:cacheprovider", "-s"]
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", *options, tmp_path]
    output = run(*command, env={"PYTHONPATH": str(ROOT)}).stdout
    assert re.findall(r"ran (\w+) ?(\d*)", output) == [
        ("many", "0"),
        ("many", "50"),
        ("many", "99"),
        ("one", ""),
    ]


SHAPED = """
import pytest
import torch

SHAPES = {"empty": (0, 5), "one": (1, 1), "odd": (7, 33), "tail": (3, 1027), "block": (3, 776)}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shaped(dtype, shape, bias):
    print("ran", shape, dtype, bias)

@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_other(dtype):
    print("other", dtype)
"""


def test_every_shape_has_a_case_and_two_turns_show_it_in_two_dtypes(tmp_path):
    (tmp_path / "test_module.py").write_text(SHAPED)
    ran = []
    for turn in ("0", "1"):
        options = ["-p", "ci.sampling", "--cases-per-test", "3", "--every-shape", turn, "-s"]
        command = [sys.executable, "-m", "pytest", "-c", "/dev/null", *options, tmp_path]
        output = run(*command, env={"PYTHONPATH": str(ROOT)}).stdout
        assert len(re.findall("other", output)) == 3
        ran += re.findall(r"ran (\(\d+, \d+\)) torch\.(\w+) (\w+)", output)
    assert len(ran) == len(set(ran)) == 10
    shapes = {shape for shape, _, _ in ran}
    assert shapes == {"(0, 5)", "(1, 1)", "(7, 33)", "(3, 1027)", "(3, 776)"}
    for shape in shapes:
        assert {dtype for s, dtype, _ in ran if s == shape} == {"float32", "bfloat16"}
        assert {bias for s, _, bias in ran if s == shape} == {"False", "True"}


def test_shares_have_nothing_in_common_and_together_all():
    functions = [f"test_file.py::test_{i}" for i in range(600)]
    shares = [[f for f in functions if is_in_share(f, k, 3)] for k in (1, 2, 3)]
    assert sorted(f for share in shares for f in share) == sorted(functions)
    assert all(150 < len(share) < 250 for share in shares)


def test_a_share_keeps_all_cases_of_a_function(tmp_path):
    (tmp_path / "test_module.py").write_text(MODULE)
    ran = []
    for share in ("1/2", "2/2"):
        options = ["-p", "ci.sampling", "--cases-per-test", "2", "--share", share, "-s"]
        command = [sys.executable, "-m", "pytest", "-c", "/dev/null", *options, tmp_path]
        output = run(*command, env={"PYTHONPATH": str(ROOT)}, check=False).stdout
        ran.append(re.findall(r"ran (\w+)", output))
    assert sorted(map(tuple, ran)) in ([("many", "many"), ("one",)], [(), ("many", "many", "one")])


def test_what_every_torch_runs_is_in_every_share(tmp_path):
    marked = MODULE.replace("def test_one", "@pytest.mark.every_torch\ndef test_one")
    (tmp_path / "test_module.py").write_text(marked)
    for share in ("1/2", "2/2"):
        options = ["-p", "ci.sampling", "--cases-per-test", "1", "--share", share, "-s"]
        command = [sys.executable, "-m", "pytest", "-c", "/dev/null", *options, tmp_path]
        output = run(*command, env={"PYTHONPATH": str(ROOT)}).stdout
        assert "ran one" in output


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "-1/2", ""])
def test_refuses_what_is_no_share(text):
    with pytest.raises(pytest.UsageError, match="expected K/N"):
        parse_share(text)


def test_a_share_alone_is_refused(tmp_path):
    (tmp_path / "test_module.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "ci.sampling"]
    done = run(*command, "--share", "1/2", tmp_path, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "needs --cases-per-test" in done.stderr


def test_a_seed_draws_the_same_cases_again_and_others_in_time():
    group = list(range(20))
    assert draw(group, 2, "a") == draw(group, 2, "a")
    drawn = {case for seed in range(200) for case in draw(group, 2, f"{seed}")}
    assert drawn == set(group)
    assert draw([1], 2, "a") == [1]


def test_whole_files_are_not_sampled(tmp_path):
    slow = MODULE.replace("def test_one", "@pytest.mark.slow\ndef test_one")
    for name in ("test_changed.py", "test_other.py"):
        (tmp_path / name).write_text(slow)
    options = ["-p", "ci.sampling", "--cases-per-test", "2", "--share", "1/2"]
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", *options, "-s", tmp_path]
    command += ["--whole", tmp_path / "test_changed.py"]
    found = run(*command, env={"PYTHONPATH": str(ROOT)}).stdout
    changed, _, other = found.partition("test_other.py")
    assert len(set(re.findall(r"ran many (\d+)", changed))) == 100
    assert "ran one" in changed
    assert len(re.findall("ran", other)) in (0, 2)
