"""Which torch the matrix runs on which Python."""

import pytest

from ci.workspace import MATRIX, drawn_run, matrix_runs, runs_between, share

TORCHES = MATRIX["torch"]["versions"]


@pytest.mark.parametrize("this", [*MATRIX["pythons"], "3.14"])
@pytest.mark.parametrize("found", [(), ("3.10",), tuple(MATRIX["pythons"])])
def test_every_torch_and_every_python_has_a_run(this, found):
    runs = matrix_runs(this, lambda python: python in found)
    assert len(set(runs)) == len(runs)
    assert {python for python, _ in runs} == {this, *MATRIX["pythons"]}
    can_run = [run for run in runs if run[0] in (this, *found)]
    last = MATRIX["torch"]["last_for_python"]
    ends = {last.get(python, TORCHES[-1]) for python in (this, *found)}
    wanted = TORCHES[: max(map(TORCHES.index, ends)) + 1]
    assert {torch for _, torch in can_run} == set(wanted)


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
