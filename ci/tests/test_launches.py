"""An op of which the emulated GPU's tests compare no row of some way of its engine is refused."""

import json
import sys

import pytest
from environments import ROOT, run

from ci import emulate, launches
from ci.emulate import find_ops
from ci.launches import FOLDER, Launch, accepted_ways, report, ways
from ci.workspace import PACKAGES


def line(rows, columns, block, used, kernel="1"):
    where = f"/cache/apex_contrib-my_op-0a1b/emu.so 0x{kernel}"
    return f"{where}\t1 1 1\t{block} 1\t{rows} {columns} 0\t{used}\n"


# What the cases odd, tail and vector of the testkit launch.
LINES = [
    line(7, 33, "16 8", "0 231 0"),
    line(3, 1027, "256 1", "0 0 3081"),
    line(5, 256, "32 4", "1280 0 0"),
]

# As the second, by several rows a block.
BOTH = line(3, 35, "8 16", "0 0 105")


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """Return a function that reports on the given lines, compared and merely launched."""
    monkeypatch.setattr(launches, "kernel_of", lambda launch: "rowwise_kernel")
    accepted = tmp_path / "accepted.toml"

    def of(compared, launched=(), exceptions=""):
        notes = {"compared": list(compared), "launched": [*compared, *launched]}
        (tmp_path / "1.json").write_text(json.dumps(notes))
        accepted.write_text(exceptions)
        return report(tmp_path, ["my_op"], accepted)

    return of


def test_all_ways_compared(noted, capsys):
    assert noted(LINES) == []
    assert "my_op: rowwise_kernel: a rest behind packs, a row a block" in (capsys.readouterr().out)


@pytest.mark.parametrize(
    ("left_out", "way"),
    [
        (0, "several rows a block|single elements"),
        (1, "a rest behind packs"),
    ],
)
def test_a_way_that_was_not_compared(noted, left_out, way):
    kept = [text for number, text in enumerate(LINES) if number != left_out]
    (wrong,) = noted(kept, [LINES[left_out]])
    assert wrong.startswith("my_op: rowwise_kernel: no compared row took: ")
    assert any(part in wrong for part in way.split("|"))


def test_an_op_without_a_launch(noted):
    """As where all cases of an op are empty or too large."""
    assert noted([]) == ["my_op: no test of it ran a kernel that the emulator saw"]
    assert noted([], exceptions='[[accepted]]\nops = ["my_op"]\nreason = "a library"\n') == []


def test_what_was_launched_and_not_compared_does_not_count(noted):
    (wrong,) = noted([], LINES)
    assert wrong.count(",") == 4  # all five ways are missing


def test_exceptions_need_a_reason_and_go_when_they_are_not_needed(noted, tmp_path):
    entry = '[[accepted]]\nops = ["my_op"]\nkernel = "rowwise_kernel"\n'
    entry += 'ways = ["a row a block"]\n'
    with pytest.raises(ValueError, match="has no reason"):
        noted(LINES, exceptions=entry)
    entry += 'reason = "its rows are short"\n'
    assert noted([LINES[0], LINES[2], BOTH], exceptions=entry) == []
    (stale,) = noted(LINES, exceptions=entry)
    assert "accepts what was compared: a row a block" in stale


@pytest.mark.parametrize("sample", ["", "1"])
@pytest.mark.parametrize(
    ("words", "missing", "code"),
    [
        ((), [], 0),
        ((), ["a way"], 1),
        (("focal_loss",), ["a way"], 1),
        (("focal_loss", "-x"), ["a way"], 0),
    ],
)
def test_a_missing_way_fails_everywhere(monkeypatch, capsys, sample, words, missing, code):
    """In .ci/run too; where pytest is told to run less, it is only printed."""
    for name in ("APEX_CACHE_DIR", "MAX_JOBS", "APEX_EMULATE_BLASLT"):
        monkeypatch.setenv(name, "")  # so that the variables are as before afterwards
    monkeypatch.setenv("APEX_CI_SAMPLE", sample)
    monkeypatch.setattr(emulate, "build_op", lambda named: None)
    monkeypatch.setattr(emulate, "build_fake_blaslt", lambda: "blaslt.so")
    monkeypatch.setattr(emulate, "run_pytest", lambda environment, *arguments: 0)
    monkeypatch.setattr(launches, "report", lambda folder, ops: missing)
    monkeypatch.setattr(emulate.costs, "check_calls", lambda ops: [])
    with pytest.raises(SystemExit) as ended:
        emulate.main(*words)
    assert int(ended.value.code) == code
    assert all(text in capsys.readouterr().out for text in missing)


@pytest.mark.parametrize(("words", "code"), [((), 1), (("focal_loss",), 1), (("-x",), 0)])
def test_other_costs_fail(monkeypatch, capsys, words, code):
    """Where pytest is told to run less, they are not counted."""
    for name in ("APEX_CACHE_DIR", "MAX_JOBS", "APEX_EMULATE_BLASLT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(emulate, "build_op", lambda named: None)
    monkeypatch.setattr(emulate, "build_fake_blaslt", lambda: "blaslt.so")
    monkeypatch.setattr(emulate, "run_pytest", lambda environment, *arguments: 0)
    monkeypatch.setattr(launches, "report", lambda folder, ops: [])
    monkeypatch.setattr(emulate.costs, "check_calls", lambda ops: [f"{ops[0]}: a launch more"])
    with pytest.raises(SystemExit) as ended:
        emulate.main(*words)
    assert int(ended.value.code) == code
    told = capsys.readouterr().out
    assert ("a launch more" in told) == ("nox -s costs -- OP" in told) == bool(code)


def test_exceptions_of_the_tree_name_ops_kernels_and_ways():
    ops = {op.name for p in PACKAGES for op in find_ops(ROOT / "packages" / p / "src")}
    for (op, kernel), names in accepted_ways().items():
        assert op in ops
        assert not kernel or names <= launches.KERNELS[kernel][1]


@pytest.mark.parametrize(
    ("kernel", "grid", "numbers", "expected"),
    [
        ("colwise_merge", (1, 1, 1), (33, 7), {"more splits"}),
        ("column_packs", (3, 2, 1), (65, 3, 4), {"several tiles", "several turns"}),
        ("column_packs", (1, 1, 1), (32, 1, 4), {"one tile", "one turn", "one block of rows"}),
        ("foreach_kernel", (7, 1, 1), (2,), {"several tensors", "several blocks of a tensor"}),
        ("segment_ranks", (7, 1, 1), (1185, 60), {"several chunks", "rows alone"}),
        ("segment_moves", (2, 1, 1), (1,), {"several tiles", "further digits"}),
        ("segment_sums", (2, 1, 1), (300, 7, 3, 33), {"sums of parts before"}),
        ("an_own_kernel", (2, 1, 1), (), set()),
    ],
)
def test_ways_of_kernels(kernel, grid, numbers, expected):
    assert expected <= ways(kernel, Launch("x", 1, grid, (32, 8, 1), numbers, 0, 0, 0))


MODULE = """
import os
import apex_testkit
import torch

def launch(number):
    with open(os.environ["APEX_EMULATE_TRACE"], "a") as file:
        file.write(f"launch {number}\\n")

def test_compares():
    launch(1)
    torch.testing.assert_close(torch.ones(1), torch.ones(1))

def test_fails():
    launch(2)
    torch.testing.assert_close(torch.ones(1), torch.zeros(1))

def test_compares_nothing():
    launch(3)

def test_compares_with_itself():
    launch(4)
    apex_testkit.assert_same_bits(lambda: torch.ones(1))
"""


def test_the_plugin_notes_launches_of_tests_that_compare(tmp_path):
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "notes").mkdir()
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "ci.launches", tmp_path]
    paths = f"{ROOT}:{ROOT / 'ci' / 'testkit'}"
    environment = {"PYTHONPATH": paths, FOLDER: str(tmp_path / "notes")}
    run(*command, env=environment, check=False)
    (file,) = (tmp_path / "notes").glob("*.json")
    notes = json.loads(file.read_text())
    assert notes["compared"] == ["launch 1\n"]
    assert notes["launched"] == [f"launch {n}\n" for n in (1, 2, 3, 4)]
