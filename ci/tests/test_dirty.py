"""CI knows what changed, and takes everything for changed where it cannot know."""

import os
import subprocess

import pytest

from ci import dirty

AMP, CONTRIB = "packages/apex-amp/src/a.py", "packages/apex-contrib/tests/test_x.py"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose commits of the given files are so many hours old."""
    monkeypatch.delenv("CI_BASE", raising=False)  # of a run that has one

    def run(*words, hours=0):
        when = f"{1_700_000_000 - 3600 * hours} +0000"
        names = {
            f"GIT_{who}_{what}": "x@y"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
        subprocess.run(["git", *words], cwd=tmp_path, env=os.environ | names | dates, check=True)

    def commit(*names, hours):
        write(*names)
        run("add", "-A")
        run("commit", "-qm", "x", hours=hours)

    def write(*names):
        for name in names:
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(file.stat().st_size if file.exists() else "") + "x")

    run("init", "-q")
    commit("README.md", AMP, CONTRIB, hours=50)
    return tmp_path, commit, write, run


def test_what_changed_lately(repository):
    root, commit, _, _ = repository
    commit(CONTRIB, hours=30)
    commit(AMP, hours=2)
    commit("README.md", hours=0)
    assert dirty.changed(root) == {"apex-amp", "examples"}
    assert dirty.changed(root, base="HEAD~3") == {"apex-amp", "apex-contrib", "examples"}
    assert dirty.changed(root, base="HEAD") == set()


def test_uncommitted_new_and_moved_files_count(repository):
    root, commit, write, run = repository
    commit("README.md", hours=0)
    assert dirty.changed(root) == set()
    write("packages/apex-amp/new.py")
    assert dirty.changed(root) == {"apex-amp", "examples"}
    run("mv", CONTRIB, "packages/apex-amp/moved.py")
    assert dirty.changed(root) == {"apex-amp", "apex-contrib", "examples"}


@pytest.mark.parametrize(
    ("file", "found"),
    [
        *(
            (file, {"shared", "examples"})
            for file in (
                "shared_csrc/native/jit.py",
                "shared_csrc/include/apex/core/gpu.h",
                "noxfile.py",
                "ci/testkit/x.py",
                ".ci/run",
                "ci/matrix.toml",
                "packages/apex-unknown/x.py",
            )
        ),
        ("docs/examples/x.py", {"examples"}),
        ("ci/tests/test_x.py", set()),
        ("ci/gpu_costs.toml", set()),
        ("ci/accepted_ways.toml", set()),
        ("shared_csrc/tests/test_x.py", set()),
    ],
)
def test_what_a_file_affects(file, found):
    assert dirty.affected([file]) == found


def test_everything_where_git_cannot_tell(repository, tmp_path_factory, monkeypatch):
    root, commit, _, run = repository
    assert dirty.changed(root) == dirty.EVERYTHING  # the only commit
    commit(AMP, hours=0)
    assert dirty.changed(root, base="no-such-commit") == dirty.EVERYTHING
    run("clone", "-q", "--depth", "1", f"file://{root}", str(root / "shallow"))
    assert dirty.changed(root / "shallow", base="HEAD") == dirty.EVERYTHING
    no_git = tmp_path_factory.mktemp("no-git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(no_git.parent))  # which may be in a checkout
    assert dirty.changed(no_git) == dirty.EVERYTHING
