"""Loops over lanes that stay scalar are found in g++'s report, and must be accepted."""

import shutil

import pytest

from ci import vectors

SOURCE = """
#include "apex/core/config.h"

double of_libm(double);  // a call that no compiler makes a vector of

void plain(const double* x, double* y) {
  APEX_VECTORIZE
  for (int i = 0; i < 64; ++i) y[i] = x[i] * 2;
}
void calls(const double* x, double* y) {
  APEX_VECTORIZE_FEW
  for (int i = 0; i < 16; ++i) y[i] = of_libm(x[i]);
}
void unmarked(const double* x, double* y) {
  for (int i = 0; i < 64; ++i) y[i] = of_libm(x[i]);
}
"""


@pytest.fixture
def planted(tmp_path):
    source = tmp_path / "planted.cpp"
    source.write_text(SOURCE)
    return source


def test_marked_loops_are_found(planted):
    assert {line for _, line in vectors.marked_loops([planted])} == {8, 12}
    assert len(vectors.marked_loops(vectors.headers(vectors.ROOT / "shared_csrc"))) > 10


@pytest.mark.builds
@pytest.mark.skipif(not shutil.which("g++"), reason="the report is g++'s")
def test_a_scalar_loop_is_found(planted, monkeypatch):
    monkeypatch.setenv("CXX", "g++")
    count, scalars = vectors.verdicts(vectors.report(planted), vectors.marked_loops([planted]))
    assert count == 1
    (line,) = scalars
    assert line.startswith("planted.cpp:12: ")


@pytest.mark.builds
def test_what_does_not_compile_is_said(planted):
    planted.write_text("int 3;")
    with pytest.raises(SystemExit, match=r"planted\.cpp does not compile"):
        vectors.report(planted)


def test_only_what_is_accepted_passes():
    scalars = {"my_op": ["a.h:1: call", "a.h:2: call"], "other": []}
    entry = {"op": "my_op", "loops": 2, "reason": "libm"}
    assert vectors.judge(scalars, [entry], all_of_them=True) == []
    first, *lines = vectors.judge(scalars, [{**entry, "loops": 1}], all_of_them=True)
    assert first.startswith("my_op: 2 loops over lanes stay scalar (accepted: 1)")
    assert [line.strip() for line in lines] == scalars["my_op"]
    (unused,) = vectors.judge({"my_op": []}, [entry], all_of_them=True)
    assert "my_op has no scalar loop" in unused
    assert vectors.judge({"other": []}, [entry], all_of_them=False) == []
    (unexplained,) = vectors.judge(scalars, [{**entry, "reason": ""}], all_of_them=True)
    assert "no reason" in unexplained
