"""The list of planted faults fits the tree, and has enough for every engine."""

from collections import Counter

import pytest
from environments import ROOT

from ci import workspace
from ci.plants import CALLS, Plant, ops_of, plants, wanted

PLANTS = plants()


@pytest.mark.parametrize("plant", PLANTS, ids=[p.name for p in PLANTS])
def test_text_is_there_once(plant):
    assert (ROOT / plant.file).read_text().count(plant.text) == 1
    assert plant.text != plant.replacement
    assert plant.op in ops_of(plant.engine)


def test_every_engine_has_three_and_every_op_too():
    counts = Counter(p.engine for p in PLANTS)
    assert all(counts[engine] >= 3 for engine in CALLS)
    of_op = Counter(op for p in PLANTS if p.each_op for op in ops_of(p.engine))
    with_engines = {op for engine in CALLS for op in ops_of(engine)}
    assert {op for op in with_engines if of_op[op] < 3} == set()
    # The rest have kernels of their BLAS library.
    assert set(workspace.ops()) - with_engines == {"dense_blaslt", "weight_gradient"}


def test_a_text_that_is_gone_is_refused(tmp_path):
    (tmp_path / "a.h").write_text("one one")
    for text, count in (("two", 0), ("one", 2)):
        plant = Plant("name", "rowwise", "a.h", text, "three", "", "op")
        with pytest.raises(ValueError, match=f"found it {count} times"):
            plant.apply(tmp_path)
    assert (tmp_path / "a.h").read_text() == "one one"


def test_an_unknown_name_is_refused():
    with pytest.raises(SystemExit, match="there is no plant nothing; expected `every`, or some of"):
        list(wanted(["nothing"]))
