"""The table of stages tells what each session took and left out."""

import json
import subprocess
import sys
import types

import pytest

from ci import stages
from ci.workspace import ROOT


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "stages.jsonl"
    monkeypatch.setenv(stages.VARIABLE, str(path))
    return path


def run(function, name="session"):
    stages.timed(function)(types.SimpleNamespace(name=name))


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_times_of_processes_and_notes_are_recorded(file):
    def busy(session):
        stages.note("2 cases of each test")
        code = "import time; e = time.process_time() + 0.3\nwhile time.process_time() < e: pass"
        subprocess.run([sys.executable, "-c", code], check=True)

    run(busy, "tests(a)")
    run(lambda session: None, "lint")
    first, second = lines(file)
    assert first["cpu"] >= 0.29  # the system counts in hundredths
    assert first["wall"] >= 0.29
    assert (first["name"], first["notes"]) == ("tests(a)", ["2 cases of each test"])
    assert (second["ended"], second["notes"]) == ("passed", [])
    assert second["cpu"] < 0.3


def test_a_session_that_fails_is_recorded_and_still_fails(file):
    with pytest.raises(ZeroDivisionError):
        run(lambda session: 1 / 0)
    assert [stage["ended"] for stage in lines(file)] == ["failed"]


def test_nothing_is_written_unless_asked_for(monkeypatch):
    monkeypatch.delenv(stages.VARIABLE, raising=False)
    run(lambda session: None)


def test_the_table(file):
    stages.record("lint", {"wall": 61.2, "cpu": 40, "ended": "passed", "notes": []})
    stages.record("tests", {"wall": 600, "cpu": 900, "ended": "failed", "notes": ["a", "b"]})
    command = [sys.executable, str(ROOT / "ci" / "stages.py"), str(file)]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split(maxsplit=4) for line in table.splitlines()[1:]] == [
        ["lint", "61", "40", "passed"],
        ["tests", "600", "900", "failed", "a; b"],
        ["sum", "661", "940"],
    ]
