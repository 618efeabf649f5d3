"""ci/fragments.py names what changed without a word to its users."""

import pytest

from ci import fragments

SOURCE = "packages/apex-amp/src/apex/amp/scaler.py"
HEADER = "shared_csrc/include/apex/core/types.h"
NATIVE = "shared_csrc/native/build.py"
TELLS = "packages/apex-amp/changes/+scaler.fixed.md"
TELLS_SHARED = "shared_csrc/changes/+types.fixed.md"


@pytest.mark.parametrize(
    ("files", "untold"),
    [
        ([], []),
        (["README.md", "packages/apex-amp/tests/test_amp.py", "shared_csrc/tests/a.cpp"], []),
        ([SOURCE], ["packages/apex-amp"]),
        ([SOURCE, TELLS], []),
        ([SOURCE, "packages/apex-contrib/changes/+x.fixed.md"], ["packages/apex-amp"]),
        ([SOURCE, "packages/apex-amp/changes/+scaler.bugfix.md"], ["packages/apex-amp"]),
        ([HEADER], ["shared_csrc"]),
        ([NATIVE, TELLS], ["shared_csrc"]),
        ([HEADER, SOURCE, TELLS_SHARED], []),
        ([SOURCE, TELLS_SHARED], ["packages/apex-amp"]),
        ([HEADER, SOURCE, TELLS], ["shared_csrc"]),
    ],
)
def test_untold(files, untold):
    found = list(fragments.untold(dict.fromkeys(files, "A")))
    assert [complaint.partition(":")[0] for complaint in found] == untold


def test_a_fragment_that_is_removed_tells_nothing():
    """A release removes fragments; a branch that only does that has none."""
    assert len(list(fragments.untold({SOURCE: "M", TELLS: "D"}))) == 1


def test_a_branch_is_compared_with_where_it_began(tmp_path, monkeypatch, capsys):
    def commit(file):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
        fragments.git(tmp_path, "add", "--all")
        own = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        fragments.git(tmp_path, *own, "commit", "--quiet", "--message", "m")

    fragments.git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit("README.md")
    fragments.git(tmp_path, "branch", "topic")
    commit(HEADER)  # of somebody else, after the branch
    fragments.git(tmp_path, "switch", "--quiet", "topic")
    commit(SOURCE)
    monkeypatch.setattr(fragments, "ROOT", tmp_path)
    monkeypatch.setattr(fragments, "files", lambda *patterns: [])
    assert fragments.main("main") == 1
    assert capsys.readouterr().out.startswith("packages/apex-amp: changed, and no fragment tells")
    commit(TELLS)
    assert fragments.main("main") == 0


def test_our_own_fragments_have_names_that_releases_take():
    assert list(fragments.misnamed()) == []
