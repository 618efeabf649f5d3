"""What .ci/run takes of each suite: all that reaches what changed, a sample of the rest, noted."""

import pytest
from environments import PACKAGES, ROOT

from ci import samples

OP = "packages/apex-contrib/src/apex/contrib/focal_loss/focal_loss.h"
AMP = "packages/apex-amp/src/apex/amp/frontend.py"
HEADER = "shared_csrc/include/apex/core/pack.h"
CONTRIB = "packages/apex-contrib/tests/"
SUITES = (*PACKAGES, "together", "compiling", "examples")


@pytest.fixture
def options(monkeypatch):
    """The options of a suite by name, with the values of each, where these files have changed."""
    notes = []
    monkeypatch.setenv("APEX_CI_SAMPLE", "1")
    monkeypatch.setattr(samples.stages, "note", notes.append)

    def of(suite, *changed, commit="x"):
        notes.clear()
        monkeypatch.setattr(samples.dirty, "changed_files", lambda *_: list(changed))
        monkeypatch.setattr(samples.dirty, "seed", lambda: commit)
        words, found = samples.of(suite), {}
        assert bool(words) == bool(notes)
        assert words[:2] in ([], ["-p", "ci.sampling"])
        pairs = [word for word in words if not word.startswith("--ignore=")]
        assert (len(pairs) < len(words)) == (suite == "compiling" and bool(words))
        for name, value in zip(pairs[2::2], pairs[3::2], strict=True):
            found.setdefault(name, []).append(value)
        return found, "".join(notes)

    return of


def test_one_op(options):
    own, note = options("apex-contrib", OP)
    assert own["--cases-per-test"] == ["2"]
    assert "--share" not in own
    assert f"{CONTRIB}test_focal_loss.py" in own["--whole"]
    assert f"{CONTRIB}test_named_functions.py" in own["--whole"]  # names the old extension module
    assert f"{CONTRIB}test_xentropy.py" not in own["--whole"]
    assert note.startswith(
        f"{len(own['--whole'])} test files reach what changed; of others 2 cases"
    )
    other, _ = options("apex-amp", OP)
    assert other == {"--cases-per-test": ["2"], "--sample-seed": ["x"]}
    shares = {options("examples", OP, commit=str(i))[0]["--share"][0] for i in range(60)}
    assert shares == {"1/4", "2/4", "3/4", "4/4"}
    together, note = options("together", OP, "docs/contrib/focal_loss.md")
    assert "ci/tests/test_docs_contrib.py" in together["--whole"]
    assert note.endswith(", one test in 4")


def test_a_changed_test_and_its_fragment(options):
    test = f"{CONTRIB}test_mlp.py"
    own, _ = options("apex-contrib", test, "packages/apex-contrib/changes/+mlp.fixed.md")
    assert own["--whole"] == [test]
    together, _ = options("together", "ci/tests/test_cover.py", "packages/apex-amp/README.md")
    assert {"ci/tests/test_cover.py", "ci/tests/test_fragments.py"} <= {*together["--whole"]}
    compiling, _ = options("compiling", "shared_csrc/tests/fold.cpp", OP)
    assert compiling["--whole"] == ["shared_csrc/tests/test_fold.py"]


def test_what_all_packages_share(options):
    for suite in PACKAGES:
        assert options(suite, HEADER)[0]["--cases-per-test"] == ["8"]
    assert options("together", HEADER, OP) == ({}, "")
    compiling, note = options("compiling", HEADER, "shared_csrc/tests/fold.cpp")
    assert compiling == {"--cases-per-test": ["8"], "--sample-seed": ["x"]}
    assert note.endswith("planted faults in `emulate` alone")
    assert options("examples", HEADER)[0]["--share"][0] in ("1/2", "2/2")


def test_examples_that_import_what_changed(options):
    tests = {*options("examples", AMP)[0]["--whole"]}
    assert {"docs/examples/dcgan/test_dcgan.py", "docs/examples/imagenet/test_parts.py"} <= tests
    own, _ = options("examples", "docs/examples/gpt/README.md")
    assert own["--whole"] == ["docs/examples/gpt/test_gpt.py"]
    assert "--whole" not in options("examples", OP)[0]


def test_whole_files_exist(options):
    for suite in SUITES:
        for file in options(suite, OP, AMP, "docs/index.md")[0].get("--whole", []):
            assert (ROOT / file).is_file()


@pytest.mark.parametrize(
    ("words", "sampled"),
    [
        (["-s", "tests"], PACKAGES),
        (["-s", "tests(apex-amp)"], ()),
        (["-s", "ci"], ()),
        ([], ()),
    ],
    ids=str,
)
def test_newcomers_run_some_cases(words, sampled, monkeypatch):
    """Where `tests` is asked for as a whole; one suite by its name, and `ci`, run in full."""
    notes = []
    monkeypatch.delenv("APEX_CI_SAMPLE", raising=False)
    monkeypatch.setattr(samples.stages, "note", notes.append)
    monkeypatch.setattr(samples.sys, "argv", ["nox", *words])
    found = {suite: samples.of(suite) for suite in SUITES}
    assert {suite for suite in SUITES if found[suite]} == {*sampled}
    assert len(notes) == len(sampled)
    assert all(found[suite][-2:] == ["--cases-per-test", "4"] for suite in sampled)


def test_all_of_a_suite(options, monkeypatch):
    project = "packages/apex-amp/pyproject.toml"
    assert options("apex-amp", project) == options("together", project) == ({}, "")
    assert options("apex-contrib", project)[0]["--cases-per-test"] == ["2"]
    monkeypatch.delenv("APEX_CI_SAMPLE")
    assert all(options(suite, OP) == ({}, "") for suite in SUITES)
    monkeypatch.setenv("APEX_CI_SAMPLE", "1")

    def unknown(*_):
        raise samples.dirty.subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(samples.dirty, "changed_files", unknown)
    for suite in SUITES:
        assert (samples.of(suite) == []) == (suite != "compiling")
