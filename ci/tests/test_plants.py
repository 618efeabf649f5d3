"""The list of planted faults fits the tree, and has enough for every engine."""

import os
from collections import Counter

import pytest
from environments import ROOT

from ci import plants as plants_module
from ci import workspace
from ci.launches import KERNELS
from ci.plants import CALLS, Plant, figure, on_every_op, ops_of, plants, wanted

PLANTS = plants()


@pytest.mark.parametrize("plant", PLANTS, ids=[p.name for p in PLANTS])
def test_text_is_there_once(plant):
    assert (ROOT / plant.file).read_text().count(plant.text) == 1
    assert plant.text != plant.replacement
    assert plant.op in ops_of(plant.engine)


def test_every_engine_has_three_and_every_op_too():
    counts = Counter(p.engine for p in PLANTS)
    assert all(counts[engine] >= 3 for engine in CALLS)
    of_op = Counter(op for _, op in on_every_op())
    with_engines = {op for engine in CALLS for op in ops_of(engine)}
    assert {op for op in with_engines if of_op[op] < 3} == set()
    # The rest have kernels of their BLAS library.
    assert set(workspace.ops()) - with_engines == {"dense_blaslt", "weight_gradient"}


def test_an_op_that_does_not_go_a_faults_way_is_left_out():
    assert {p.way for p in PLANTS} - {""} <= set().union(*(named for _, named in KERNELS.values()))
    tries = {(p.name, op) for p, op in on_every_op()}
    assert ("row-rest", "focal_loss") in tries
    assert ("row-rest", "fused_bias_swiglu") not in tries
    assert ("row-block", "fused_bias_swiglu") in tries


def test_the_figure_at_the_end():
    assert figure(37, 38, 2400) == "37 of 38 found (97 %) in 40 min"


def test_a_text_that_is_gone_is_refused(tmp_path):
    (tmp_path / "a.h").write_text("one one")
    for text, count in (("two", 0), ("one", 2)):
        plant = Plant("name", "rowwise", "a.h", text, "three", "", "op")
        with pytest.raises(ValueError, match=f"found it {count} times"):
            plant.apply(tmp_path)
    assert (tmp_path / "a.h").read_text() == "one one"


def test_a_file_without_its_fault_is_newer_than_what_was_built_with_it(tmp_path, monkeypatch):
    """ninja would not build it again otherwise."""
    source, copied = tmp_path / "tree" / "a.h", tmp_path / "copy" / "a.h"
    source.parent.mkdir()
    source.write_text("right")
    os.utime(source, (1, 1))
    times = []
    for name, folder in (("ROOT", source), ("COPY", copied)):
        monkeypatch.setattr(plants_module, name, folder.parent)
    monkeypatch.setattr(
        plants_module, "failure", lambda op: times.append(copied.stat().st_mtime_ns) or "1 failed"
    )
    assert plants_module.try_plant(Plant("n", "rowwise", "a.h", "right", "wrong", "", "op"), "op")
    assert copied.read_text() == "right"
    assert copied.stat().st_mtime_ns > times[0] > 2 * 10**9


def test_tests_that_fail_anyhow_are_no_find(monkeypatch):
    monkeypatch.setattr(plants_module, "copy_tree", lambda: None)
    monkeypatch.setattr(plants_module, "failure", lambda *ops: "1 failed")
    with pytest.raises(SystemExit, match="without a fault, tests of focal_loss fail:\n1 failed"):
        plants_module.main("row-rest")


def test_an_unknown_name_is_refused():
    with pytest.raises(SystemExit, match="there is no plant nothing; expected `every`, or some of"):
        list(wanted(["nothing"]))
