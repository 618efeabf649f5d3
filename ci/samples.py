"""What .ci/run takes of each suite of tests: all that reaches what changed, a sample of the rest.

`nox -s tests`, with which newcomers try everything, takes a few cases of each test of the packages.

Test files that import what changed, directly or not, run in full (ci/reach.py). Of the cases of
other tests a few are drawn, others at each commit: more where something changed that all packages
share, kernels' headers among it. Of suites that test no single op, a share of the functions.
"""

import os
import random
import re
import sys
from pathlib import PurePosixPath

from ci import dirty, reach, stages, workspace
from ci.workspace import ROOT, files

CASES, CASES_OF_SHARED = 2, 8  # of each test function
CASES_OF_NEWCOMERS = 4
# How many commits it takes by chance until a function runs that reaches nothing that changed: where
# something that all packages share has changed, and where not.
TURNS = {"together": (1, 4), "compiling": (1, 4), "examples": (2, 4)}
OTHERS = ("ci/tests/", "ci/testkit/", "shared_csrc/tests/")
EXAMPLES = "docs/examples/"
PLANTED = "shared_csrc/tests/emulation"  # `emulate` runs all of it, too
READERS = re.compile(r"ci/tests/test_(docs_\w+|fragments)\.py")  # of prose


def of(suite: str) -> list[str]:
    """Return pytest's options that sample a suite, and note it; none where all of it runs."""
    if not os.environ.get("APEX_CI_SAMPLE"):
        return of_newcomers(suite)
    is_shared, seed = dirty.SHARED in dirty.changed(), dirty.seed()
    if is_shared and suite == "together":
        return []
    try:
        if is_shared and suite == "compiling":
            whole = []  # in full, they take 13 minutes of a core
        else:
            base = os.environ.get("CI_BASE")
            whole = whole_files(suite, dirty.changed_files(ROOT, base))
    except dirty.UNKNOWN:
        return []
    cases = CASES_OF_SHARED if is_shared else CASES
    turns = TURNS.get(suite, (1, 1))[not is_shared]
    options = ["-p", "ci.sampling", "--cases-per-test", str(cases), "--sample-seed", seed]
    note = f"{len(whole)} test files reach what changed; of others {cases} cases of each test"
    if suite == "compiling":
        options.append(f"--ignore={PLANTED}")
        note += ", planted faults in `emulate` alone"
    if turns > 1:
        options += ["--share", f"{random.Random(seed).randrange(turns) + 1}/{turns}"]
        note += f", one test in {turns}"
    stages.note(note)
    return options + [word for file in whole for word in ("--whole", file)]


def of_newcomers(suite: str) -> list[str]:
    """Return the options where `tests` is asked for as a whole, and not one suite by its name."""
    if "tests" not in sys.argv or suite not in workspace.PACKAGES:
        return []
    stages.note(f'{CASES_OF_NEWCOMERS} cases of each test; `nox -s "tests({suite})"` runs all')
    return ["-p", "ci.sampling", "--cases-per-test", str(CASES_OF_NEWCOMERS)]


def whole_files(suite: str, changed: list[str]) -> list[str]:
    """Return the test files of a suite that reach what changed.

    Raises:
        LookupError: what changed may matter to any test of the suite.
    """
    code = [file for file in changed if not file.endswith(".md")]
    if suite == "examples":
        own = [file for file in changed if file.startswith(EXAMPLES)]
        found = {*own, *reach.reached([file for file in code if file.startswith("packages/")])}
        folders = {PurePosixPath(file).parent for file in found if file.startswith(EXAMPLES)}
        return [test for test in _tests(EXAMPLES) if PurePosixPath(test).parent in folders]
    # Of the packages' suites each has its own package alone. What compiles tests no op of theirs.
    own = {"together": OTHERS, "compiling": OTHERS}.get(suite, (f"packages/{suite}/",))
    changing = (*own, "packages/") if suite == "together" else own
    found = {*reach.reached([file for file in code if file.startswith(changing)])}
    if suite == "together" and any(f.endswith(".md") or f.startswith("docs/") for f in changed):
        found |= {test for test in _tests("ci/tests") if READERS.fullmatch(test)}
    return sorted(file for file in found if file.startswith(own) and reach.is_test(file))


def _tests(folder: str) -> list[str]:
    found = (file.relative_to(ROOT).as_posix() for file in files(folder))
    return [file for file in found if reach.is_test(file) and file.endswith(".py")]


def leaves_out(run: tuple[str, str], between: list[tuple[str, str]]) -> bool:
    """Whether .ci/run leaves out a run of the matrix, which it then notes."""
    if not os.environ.get("APEX_CI_SAMPLE") or run not in between:
        return False
    if dirty.SHARED not in dirty.changed():
        stages.note("left out: nothing that all packages share has changed")
        return True
    if run != workspace.drawn_run(list(filter(_can_run, between)) or between, dirty.seed()):
        stages.note("left out: of the runs between oldest and newest, one is drawn by lot")
        return True
    return False


def _can_run(run: tuple[str, str]) -> bool:
    return run[0] == workspace.THIS_PYTHON or workspace.has_python(run[0])


def of_run(run: tuple[str, str], between: list[tuple[str, str]]) -> list[str]:
    """Return pytest's options for a run of the matrix, and note them.

    All ran on one torch in `tests`. Here two cases of each test function run on the oldest and the
    newest torch, and between them, by turns, one case of every other function. In .ci/run, the
    oldest and the newest have half of the functions each, too, by lot, with one case; a quarter
    where nothing that all packages share has changed.
    """
    is_sampled = bool(os.environ.get("APEX_CI_SAMPLE"))
    options = ["--cases-per-test", "1" if is_sampled or run in between else "2"]
    if is_sampled or run in between:
        part = workspace.share(run, between, seed := dirty.seed())
        if is_sampled and dirty.SHARED not in dirty.changed():
            part = f"{int(part[0]) + random.Random(seed).choice([0, 2])}/4"
        options += ["--share", part]
    stages.note(" ".join(options))
    return ["-p", "ci.sampling", *options]
