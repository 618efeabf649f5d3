"""Which torch the matrix runs on which Python."""

import pytest

from ci import samples
from ci.workspace import MATRIX, drawn_run, matrix_runs, runs_between, share, torches_of

TORCHES = MATRIX["torch"]["versions"]
PYTHONS = [*MATRIX["pythons"], *MATRIX["free_threaded"]]


@pytest.mark.parametrize("this", [*PYTHONS, "3.16"])
@pytest.mark.parametrize("found", [(), ("3.10",), tuple(PYTHONS)])
def test_every_torch_and_every_python_has_a_run(this, found):
    runs = matrix_runs(this, lambda python: python in found)
    assert len(set(runs)) == len(runs)
    assert {python for python, _ in runs} == {this, *PYTHONS}
    can_run = [run for run in runs if run[0] in (this, *found)]
    wanted = {*torches_of(this), *(torches_of(python)[-1] for python in found)}
    assert {torch for _, torch in can_run} == wanted
    assert all(torch in torches_of(python) for python, torch in runs)


def test_torches_of_a_python():
    assert torches_of("3.13") == torches_of("3.14") == torches_of("3.16") == TORCHES
    assert torches_of("3.10") == TORCHES[:-1]
    assert torches_of("3.15") == TORCHES[-1:]


def test_the_ends_are_not_between():
    runs = matrix_runs("3.11", lambda python: True)
    between = runs_between(runs, "3.11")
    assert set(runs) - set(between) == {("3.11", TORCHES[0]), ("3.11", TORCHES[-1])}


def test_one_of_those_between_is_drawn_and_each_at_some_commit():
    between = runs_between(matrix_runs("3.11", lambda python: True), "3.11")
    draws = [drawn_run(between, f"commit {i}") for i in range(100)]
    assert set(draws) == set(between)
    assert drawn_run(between, "commit 7") == draws[7]


def test_the_oldest_and_the_newest_torch_share_all_functions():
    runs = matrix_runs("3.11", lambda python: True)
    between = runs_between(runs, "3.11")
    oldest, newest = [run for run in runs if run not in between]
    halves = [(share(oldest, between, str(i)), share(newest, between, str(i))) for i in range(40)]
    assert set(halves) == {("1/2", "2/2"), ("2/2", "1/2")}
    assert {share(run, between, "any") for run in between} == {"1/2", "2/2"}


@pytest.fixture
def sampled(monkeypatch):
    """In .ci/run, with what has changed and the commit; gives the notes."""
    notes = []
    monkeypatch.setenv("APEX_CI_SAMPLE", "1")
    monkeypatch.setattr(samples.stages, "note", notes.append)

    def set_(changed, commit):
        monkeypatch.setattr(samples.dirty, "changed", lambda: frozenset(changed))
        monkeypatch.setattr(samples.dirty, "seed", lambda: commit)
        return notes

    return set_


@pytest.mark.parametrize(("changed", "parts"), [({"shared"}, 2), ({"apex-contrib"}, 4)])
def test_shares_of_a_run(sampled, changed, parts):
    between = runs_between(runs := matrix_runs("3.11", lambda python: True), "3.11")
    oldest, newest = [run for run in runs if run not in between]
    seen = set()
    for i in range(60):
        notes = sampled(changed, f"commit {i}")
        options = [samples.of_run(run, between) for run in (oldest, newest)]
        assert notes[-2:] == [" ".join(each[2:]) for each in options]
        assert {each[each.index("--cases-per-test") + 1] for each in options} == {"1"}
        numbers, counts = zip(*(each[-1].split("/") for each in options), strict=True)
        assert len(set(numbers)) == 2
        assert counts == (str(parts),) * 2
        seen |= set(numbers)
    assert seen == {str(i + 1) for i in range(parts)}


def test_runs_that_are_left_out(sampled, monkeypatch):
    monkeypatch.setattr(samples.workspace, "THIS_PYTHON", "3.11")
    monkeypatch.setattr(samples.workspace, "has_python", lambda python: python != "3.14")
    between = runs_between(runs := matrix_runs("3.11", lambda python: True), "3.11")
    ends = [run for run in runs if run not in between]
    notes = sampled({"shared"}, "commit 1")
    left = [samples.leaves_out(run, between) for run in between]
    assert left.count(False) == 1
    assert len(notes) == len(between) - 1
    drawn = set()  # never one whose Python is not here
    for i in range(60):
        sampled({"shared"}, f"commit {i}")
        drawn |= {run for run in between if not samples.leaves_out(run, between)}
    assert drawn == {run for run in between if run[0] != "3.14"}
    sampled({"apex-contrib", "examples"}, "commit 1")
    assert all(samples.leaves_out(run, between) for run in between)
    assert not any(samples.leaves_out(run, between) for run in ends)


def test_all_runs_where_nobody_asks_for_a_sample(monkeypatch):
    monkeypatch.delenv("APEX_CI_SAMPLE", raising=False)
    between = runs_between(runs := matrix_runs("3.11", lambda python: True), "3.11")
    assert not any(samples.leaves_out(run, between) for run in runs)
    options = {run: samples.of_run(run, between) for run in runs}
    for run, words in options.items():
        if run in between:
            assert words[2:] == ["--cases-per-test", "1", "--share", share(run, between, "")]
        else:
            assert words[2:] == ["--cases-per-test", "2"]
