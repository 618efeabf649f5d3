"""What CI's secondary compilers take: ops that changed, and ops that cover every header."""

import pytest

from ci import cover
from ci.workspace import ROOT

HEADER = "shared_csrc/include/apex/core/pack.h"
OP = "packages/apex-contrib/src/apex/contrib/focal_loss/focal_loss.h"
SEEDS = [f"commit {i}" for i in range(30)]


@pytest.fixture(scope="module")
def headers():
    return {op: cover.headers_of(folder) for op, folder in cover.op_folders().items()}


def test_every_header_but_those_that_nobody_includes_is_known(headers):
    known = {p.relative_to(cover.INCLUDE).as_posix() for found in headers.values() for p in found}
    there = {p.relative_to(cover.INCLUDE).as_posix() for p in cover.INCLUDE.rglob("*.h")}
    # Found by hipcc's own headers; named on command lines, see shared_csrc/README.md.
    assert there - known == {
        "apex/compat/thrust/complex.h",
        "apex/rtc/host.h",
        "apex/rtc/standard.h",
    }


@pytest.mark.parametrize("seed", SEEDS[:5])
def test_a_change_of_shared_headers_compiles_every_header(headers, seed):
    chosen = cover.sample([HEADER], seed)
    assert set().union(*(headers[op] for op in chosen)) == set().union(*headers.values())
    assert len(chosen) < len(headers) / 2
    assert cover.sample([HEADER], seed) == chosen


@pytest.mark.parametrize("seed", SEEDS[:5])
def test_a_slow_compiler_takes_every_header_of_the_engines_and_few_ops(headers, seed):
    folders = cover.op_folders()
    every_op = [f"{folder.relative_to(ROOT)}/x.h" for folder in folders.values()]
    chosen = cover.sample([HEADER, *every_op], seed, slow=True)
    engines = {
        header
        for header in set().union(*headers.values())
        if header.relative_to(cover.INCLUDE).parts[:2] in (("apex", "core"), ("apex", "engine"))
    }
    assert engines
    assert engines <= set().union(*(headers[op] for op in chosen))
    assert len(chosen) < len(headers) / 3
    assert "focal_loss" in cover.sample([OP], seed, slow=True)


def test_a_slow_compiler_takes_each_op_that_changed_at_some_commit():
    changed = [f"{folder.relative_to(ROOT)}/x.h" for folder in cover.op_folders().values()]
    drawn = {op for i in range(200) for op in cover.sample(changed, f"commit {i}", slow=True)}
    assert drawn == set(cover.op_folders())


def test_every_op_has_its_turn(headers):
    assert {op for seed in SEEDS for op in cover.sample([HEADER], seed)} > set(
        cover.sample([HEADER], SEEDS[0])
    )
    drawn = {op for i in range(200) for op in cover.sample(["README.md"], f"commit {i}")}
    assert drawn == set(headers)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_op_that_changed_is_compiled(seed):
    assert "focal_loss" in cover.sample([OP], seed)
    assert len(cover.sample([OP], seed)) == 1 + cover.BY_LOT
    assert len(cover.sample(["docs/index.md"], seed)) == cover.BY_LOT


def test_all_ops_where_git_cannot_tell(headers):
    assert cover.sample(None, "any") == sorted(headers)


def test_a_file_beside_an_op_is_not_the_ops():
    beside = "packages/apex-contrib/src/apex/contrib/focal_loss_other/x.h"
    chosen = {seed: cover.sample([beside], seed) for seed in SEEDS}
    assert any("focal_loss" not in ops for ops in chosen.values())
    assert (ROOT / OP).is_file()


def test_some_of_the_names_where_ci_samples(monkeypatch):
    names = ("engines", "exp", "fold", "halves")
    monkeypatch.delenv("APEX_CI_SAMPLE", raising=False)
    assert cover.some(names, 2) == list(names)
    monkeypatch.setenv("APEX_CI_SAMPLE", "1")
    drawn = set()
    for seed in SEEDS:
        monkeypatch.setattr(cover.dirty, "seed", lambda seed=seed: seed)
        chosen = cover.some(names, 2)
        assert len(set(chosen)) == 2
        drawn |= set(chosen)
    assert drawn == set(names)


def test_a_lot_of_kernels_is_noted(monkeypatch):
    notes = []
    monkeypatch.setattr(cover.stages, "note", notes.append)
    assert cover.lot_of_kernels() == ["--lot"]
    assert f"those of gpu_costs.toml and {cover.LOT} of each engine" in notes[0]
