"""A release, rehearsed in a copy of the checkout: everything but kernels and the push."""

import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from environments import NO_KERNELS, PACKAGES, copy_checkout

from ci import release, workspace
from ci.release import ReleaseError

HEADER = "shared_csrc/include/apex/core/config.h"


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """A checkout of its own, with all of this one committed and no tag."""
    copy = copy_checkout(tmp_path_factory.mktemp("committed") / "checkout")
    for name in ("user.name", "user.email"):
        release.git(copy, "config", name, "tester@localhost")
    save(copy, "all")
    return copy


@pytest.fixture
def root(committed, tmp_path):
    """A copy of it for one test."""
    return Path(shutil.copytree(committed, tmp_path / "checkout", symlinks=True))


def save(root, message):
    release.git(root, "add", "--all")
    release.git(root, "commit", "--quiet", "--message", message)


def make(root, package, version):
    """Release as the command does, without building."""
    made = release.plan(root, package, version)
    release.write(root, made)
    release.commit(root, made)
    return made


def change_shared(root, name, text):
    """Change a header that all packages vendor, and say so."""
    header = root / HEADER
    header.write_text(header.read_text() + f"\n// {name}\n")
    changes = root / "shared_csrc" / "changes"
    changes.mkdir(exist_ok=True)
    (changes / f"+{name}.fixed.md").write_text(text + "\n")
    save(root, name)


def built(root, package, folder):
    """Build twice, and return the wheel's METADATA and the vendored header."""
    folder.mkdir()
    files = release.build_twice(root, package, folder, os.environ | NO_KERNELS)
    (wheel,) = (file for file in files if file.suffix == ".whl")
    assert len(files) == 2
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith("/METADATA"))
        (header,) = (n for n in names if n.endswith("/_shared/include/apex/core/config.h"))
        return archive.read(metadata).decode(), archive.read(header).decode()


def test_a_shared_change_reaches_two_packages_of_different_versions(root, tmp_path):
    make(root, "apex-amp", "1.0.0")
    make(root, "apex-contrib", "1.0.0")
    change_shared(root, "warp-sums", "Sums over a warp are exact.")
    own = root / "packages/apex-amp/changes"
    own.mkdir()  # the release before has emptied it
    (own / "+scale.added.md").write_text("Loss scales\nmay be tensors.\n")
    save(root, "scale")

    amp = make(root, "apex-amp", "1.1.0")
    contrib = make(root, "apex-contrib", "1.0.1")

    assert (amp.previous, contrib.previous) == ("apex-amp-v1.0.0", "apex-contrib-v1.0.0")
    assert amp.shared == contrib.shared == ("shared_csrc/changes/+warp-sums.fixed.md",)
    own = release.section(root, "apex-amp", "1.1.0")
    assert "Loss scales may be tensors." in own
    assert (
        own.index("Loss scales") < own.index("### Shared kernels") < own.index("Sums over a warp")
    )
    other = release.section(root, "apex-contrib", "1.0.1")
    assert "Sums over a warp are exact." in other
    assert "Loss scales" not in other
    assert "stable ABI" not in own  # told by 1.0.0
    for package, version in (("apex-amp", "1.1.0"), ("apex-contrib", "1.0.1")):
        metadata, header = built(root, package, tmp_path / package)
        assert re.search(rf"^Version: {re.escape(version)}$", metadata, re.MULTILINE)
        assert header.endswith("// warp-sums\n")
    message = release.git(root, "tag", "--list", "--format=%(contents)", "apex-amp-v1.1.0")
    assert message.strip() == own
    assert release.git(root, "cat-file", "-t", "apex-amp-v1.1.0") == "tag"


def test_shared_fragments_stay_until_all_packages_have_told_them(root):
    present = {path for _, path in release.fragments(root, "HEAD")}
    assert present
    for package in PACKAGES[:-1]:
        assert make(root, package, "1.0.0").obsolete == ()
        assert {path for _, path in release.fragments(root, "HEAD")} == present
    last = make(root, PACKAGES[-1], "1.0.0")
    assert set(last.obsolete) == set(last.shared) == present
    assert release.fragments(root, "HEAD") == set()
    # A fragment of a name that was used before is a new one.
    change_shared(root, "first", "Something else.")
    assert make(root, PACKAGES[0], "1.0.1").shared == ("shared_csrc/changes/+first.fixed.md",)


def test_a_change_of_the_shared_namespace_names_the_siblings(root, capsys):
    for package in ("apex-amp", "apex-contrib"):
        make(root, package, "1.0.0")
    file = root / release.NAMESPACE
    file.write_text(file.read_text() + "# new\n")
    change_shared(root, "namespace", "Other messages.")
    capsys.readouterr()
    assert make(root, "apex-amp", "1.0.1").siblings == ("apex-contrib",)
    assert "release apex-contrib too" in capsys.readouterr().out
    assert make(root, "apex-contrib", "1.0.1").siblings == ()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("1.0", None),
        ("1.1.0rc1", None),
        ("1.0.0", "is not above that of apex-amp-v1.0.0"),
        ("0.9.0", "is not above"),
        ("1.0.0rc1", "is not above"),
        ("1.1.0+cu130", "expected a public one, such as 1.1.0"),
        ("1.1.0.dev1", "expected a public one"),
        ("1.01.0", "expected a public one, such as 1.1.0"),
        ("v1.1.0", "expected a public one"),
        ("next", "expected one like 1.4.0"),
    ],
)
def test_versions(root, version, reason):
    if version == "1.0":
        make(root, "apex-amp", version)
        return
    make(root, "apex-amp", "1.0.0")
    change_shared(root, "any", "Anything.")
    before = release.git(root, "rev-parse", "HEAD")
    if reason is None:
        assert make(root, "apex-amp", version).previous == "apex-amp-v1.0.0"
        return
    with pytest.raises(ReleaseError, match=re.escape(reason)):
        release.plan(root, "apex-amp", version)
    assert release.git(root, "rev-parse", "HEAD") == before


def test_a_release_without_a_change_is_refused(root):
    make(root, "apex-amp", "1.0.0")
    with pytest.raises(ReleaseError, match="nothing changed since apex-amp-v"):
        release.plan(root, "apex-amp", "1.0.1")


def test_only_what_is_committed_is_released(root, tmp_path):
    (root / "README.md").write_text("changed\n")
    with pytest.raises(ReleaseError, match=r"not committed:\s+M README"):
        release.clone_of(root, tmp_path / "clone", placeholder=True)


def test_a_clone_has_tags_and_an_author(root, tmp_path):
    make(root, "apex-amp", "1.0.0")
    clone = release.clone_of(root, tmp_path / "clone", placeholder=True)
    assert release.last_tag(clone, "apex-amp") == "apex-amp-v1.0.0"
    change_shared(clone, "any", "Anything.")
    make(clone, "apex-amp", "1.0.1")
    assert release.last_tag(root, "apex-amp") == "apex-amp-v1.0.0"


def test_the_tag_that_is_built_must_be_the_one_that_is_checked_out(root):
    make(root, "apex-amp", "1.0.0")
    assert release.check_tag(root, "apex-amp", "1.0.0") == "apex-amp-v1.0.0"
    change_shared(root, "any", "Anything.")
    with pytest.raises(ReleaseError, match="another commit"):
        release.check_tag(root, "apex-amp", "1.0.0")
    release.git(root, "tag", "apex-amp-v2.0.0")
    with pytest.raises(ReleaseError, match=r"does not have version 2\.0\.0"):
        release.check_tag(root, "apex-amp", "2.0.0")
    with pytest.raises(ReleaseError, match=r"apex-amp-v3\.0\.0"):
        release.check_tag(root, "apex-amp", "3.0.0")


def test_versions_are_ordered_as_numbers(root):
    for version in ("1.9.0", "1.10.0", "1.10.0rc1"):
        release.git(root, "tag", f"apex-amp-v{version}")
    assert release.last_tag(root, "apex-amp") == "apex-amp-v1.10.0"


def test_a_build_that_is_not_the_same_twice_is_refused(root, tmp_path, monkeypatch):
    made = []

    def build(root, package, folder, environment):
        folder.mkdir(exist_ok=True)
        (folder / "a.whl").write_text(f"build {len(made)}")
        made.append(folder)
        return [folder / "a.whl"]

    monkeypatch.setattr(release, "build", build)
    with pytest.raises(ReleaseError, match=r"a second build gives another a\.whl"):
        release.build_twice(root, "apex-amp", tmp_path / "dist", {})


def test_every_package_has_a_fragment_or_a_release():
    """The CHANGELOG of a first release is not empty."""
    for package in PACKAGES:
        told = "\n## " in (workspace.ROOT / "packages" / package / "CHANGELOG.md").read_text()
        assert told or release.own_fragments(workspace.ROOT, package)
