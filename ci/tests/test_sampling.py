"""The sampling plugin runs every test function, and of each as many cases as it is told."""

import re
import sys

import pytest
from environments import ROOT, run

from ci.sampling import spread

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
