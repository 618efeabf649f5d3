"""ci/new_torch.py keeps the six newest minor releases of torch, from made-up lists of versions."""

import pytest

from ci import new_torch, workspace
from ci.workspace import tomllib

MATRIX = """pythons = ["3.10", "3.13"]

[torch]
build = "2.13.0" # the headers
# all of these
versions = ["2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
first_for_python = {}
last_for_python = { "3.10" = "2.14.1" } # no wheels
"""
ALL = ["2.15.0", "2.14.1", "2.14.0", "2.13.0", "2.12.1", "2.12.0", "2.11.0", "2.10.0", "2.9.1"]
OLD = [v for v in ALL if not v.startswith("2.15")]


def update(new, old=OLD, text=MATRIX):
    """Return the table `torch` and the changes, where Python 3.10 has `old` and 3.13 has `new`."""
    matrix = tomllib.loads(text)
    found = {"3.10": old, "3.13": new}
    text, changes = new_torch.updated(text, matrix["torch"], matrix["pythons"], found.get)
    assert "\n# all of these\nversions = [" in text  # comments stay
    assert text.endswith(" # no wheels\n")
    return tomllib.loads(text)["torch"], changes, text


def test_nothing_changes_where_nothing_is_new():
    assert update(ALL)[1:] == ([], MATRIX)


def test_a_new_minor_release_pushes_the_oldest_out():
    torch, changes, _ = update(["2.16.0", "2.17.0rc1", *ALL])
    assert torch["versions"] == ["2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0", "2.16.0"]
    assert torch["last_for_python"] == {"3.10": "2.14.1"}
    assert changes[0] == "torch 2.16.0 is new"
    assert changes[1].startswith("torch 2.10.0 leaves the six newest: if a package still promises")
    assert len(changes) == 2


def test_a_patch_release_takes_the_place_of_its_minor():
    torch, changes, _ = update(["2.15.1", "2.14.2", *ALL], ["2.14.10", "2.14.9", *OLD])
    assert torch["versions"] == ["2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.10", "2.15.1"]
    assert torch["last_for_python"] == {"3.10": "2.14.10"}
    assert changes == [
        "torch 2.14.10 comes for 2.14.1",
        "torch 2.15.1 comes for 2.15.0",
        "Python 3.10 ends with torch 2.14.10",
    ]


def test_a_python_that_gets_wheels_again_is_no_exception():
    torch, changes, text = update(ALL, ALL)
    assert torch["last_for_python"] == {}
    assert changes == ["Python 3.10 ends with torch 2.15.0"]
    assert "last_for_python = {} # no wheels" in text


def test_a_python_that_has_only_later_torches():
    torch, changes, _ = update(ALL, ["2.15.0"])
    assert torch["first_for_python"] == {"3.10": "2.15.0"}
    assert torch["last_for_python"] == {}
    assert changes == ["Python 3.10 begins with torch 2.15.0", "Python 3.10 ends with torch 2.15.0"]
    matrix = MATRIX.replace("first_for_python = {}", 'first_for_python = { "3.10" = "2.12.1" }')
    assert update(ALL, text=matrix)[1] == ["Python 3.10 begins with torch 2.10.0"]


def test_what_is_left_to_a_person_is_said():
    """The torch of the build leaves, and a Python has nothing that is left."""
    later = [f"2.{minor}.0" for minor in range(16, 20)]
    torch, changes, _ = update([*later, *ALL], ["2.13.0"])
    assert torch["versions"][0] == "2.14.1"
    assert any(c.startswith("wheels are compiled against 2.13.0: choose another") for c in changes)
    assert any(c.startswith("Python 3.10 has none of these torches any more") for c in changes)


@pytest.mark.parametrize(
    ("new", "text", "reason"),
    [
        ([], MATRIX, r"the index ends with torch \[\]"),
        (["2.14.1"], MATRIX, r"the index ends with torch \['2.14.1'\], and the matrix with 2.15.0"),
        (ALL, MATRIX + 'versions = ["1"]\n', "expected one line `versions = `, found 2"),
    ],
)
def test_what_cannot_be_right_changes_nothing(new, text, reason):
    torch = tomllib.loads(MATRIX)["torch"]
    old = [] if not new else ["2.13.0"]
    with pytest.raises(ValueError, match=reason):
        new_torch.updated(text, torch, ["3.10", "3.13"], {"3.10": old, "3.13": new}.get)


def test_our_own_matrix_has_the_lines():
    """Where the index has what the matrix has, not a byte changes."""
    text = (workspace.ROOT / "ci" / "matrix.toml").read_text()
    matrix = workspace.MATRIX
    torch, pythons = matrix["torch"], [*matrix["pythons"], *matrix["free_threaded"]]

    assert new_torch.updated(text, torch, pythons, workspace.torches_of) == (text, [])
