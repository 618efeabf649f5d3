"""Home and cache folders that are missing or cannot hold kernels, odd names, other users."""

import os
import shutil

import pytest
from places import (
    AN_OP,
    NAMELESS,
    NOBODY,
    Place,
    noexec,
    read_only,
    runs,
    said,
    seeing,
    succeeded,
)

from ci.workspace import wheel

COMPILES = "apex: compiling multi_tensor for the CPU"
# A user of the system has none of root's compiler caches.
COMPILER_ALONE = {"APEX_COMPILER_LAUNCHER": None, "CCACHE_DIR": None}


def test_a_home_that_cannot_be_written(place, sources, tmp_path):
    """The error names APEX_CACHE_DIR, which helps; so does a wheel with kernels."""
    inside = seeing(read_only(place.home), read_only(place.site))
    place.install("--no-deps", sources["apex-amp"])
    assert "BuildError: apex.amp: multi_tensor" in said(place.execute(AN_OP, inside=inside))
    text = said(place.execute(AN_OP, inside=inside))
    assert f"cannot be built in the cache folder {place.home}/.cache/apex: " in text
    assert "Read-only file system" in text
    assert "Set APEX_CACHE_DIR to a folder that can be written." in text
    checked = place.doctor("amp", "--check", inside=inside)
    assert checked.returncode == 1
    assert f"Kernels that are compiled here cannot be kept: {place.home}" in checked.stdout
    assert "-> Set APEX_CACHE_DIR to a folder of your own" in checked.stdout

    helped = place.execute(AN_OP, inside=inside, APEX_CACHE_DIR=str(tmp_path / "cache"))
    assert runs(helped)
    place.install("--no-deps", "--force-reinstall", wheel("apex-amp"))
    assert runs(place.execute(AN_OP, inside=inside))


@pytest.mark.parametrize("user", [NOBODY, NAMELESS], ids=["nobody", "a user without a name"])
def test_no_home_at_all(place, sources, user):
    inside = seeing(user=user, folder=place.home.parent)
    where = {"inside": inside, "HOME": None, **COMPILER_ALONE}
    place.install("--no-deps", sources["apex-amp"])
    text = said(place.execute(AN_OP, **where))
    if user == NAMELESS:
        assert "There is no folder for kernels that are compiled here" in text
        assert f"user {user} has no home folder" in text
    else:  # its home folder has a name, and does not exist
        assert "cannot be built in the cache folder" in text
        assert "Permission denied" in text
    assert "Set APEX_CACHE_DIR to a folder that can be written." in text

    place.install("--no-deps", "--force-reinstall", wheel("apex-amp"))
    assert runs(place.execute(AN_OP, **where))


def test_a_cache_where_code_may_not_run(place, sources, tmp_path):
    """It is said before a minute of compiling; a library that lies there already, too."""
    place.install("--no-deps", sources["apex-amp"])
    cache = {"APEX_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir(0o700)
    inside = seeing(noexec(tmp_path / "cache"))
    for _ in range(2):
        tried = place.execute(AN_OP, inside=inside, **cache)
        text = said(tried)
        assert f"cannot be kept in the cache folder {tmp_path}/cache: its file system" in text
        assert "forbids running code (noexec). Set APEX_CACHE_DIR to a folder on one" in text
        assert COMPILES not in text
        checked = place.doctor("amp", "--check", inside=inside, **cache)
        assert checked.returncode == 1
        assert "forbids running code (noexec)" in checked.stdout
        assert "Set APEX_CACHE_DIR to a folder" in checked.stdout
        assert runs(place.execute(AN_OP, **cache))


def test_a_wheel_where_code_may_not_run(place):
    place.install("--no-deps", wheel("apex-amp"))
    tried = place.execute(AN_OP, inside=seeing(noexec(place.site)))
    assert f"cannot load {place.site}/apex/amp/_kernels/cpu-" in said(tried)
    remedy = "forbids running code (noexec): install the package on one that allows it."
    assert remedy in said(tried)
    checked = place.doctor("amp", "--check", inside=seeing(noexec(place.site)))
    assert checked.returncode == 1
    assert remedy in checked.stdout


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_spaces_and_other_alphabets(tmp_path, sources, locale):
    folder = tmp_path / "Ordner für 模型 & 'ö'"
    folder.mkdir()
    place = Place(folder)
    place.install("--no-deps", sources["apex-amp"], wheel("apex-optimizers"), LC_ALL=locale)
    compiled = place.execute(AN_OP, LC_ALL=locale)
    assert runs(compiled)
    assert f"it is kept in {place.home}/.cache/apex" in compiled.stderr
    assert COMPILES not in place.execute(AN_OP, LC_ALL=locale).stderr
    prebuilt = AN_OP.replace("apex.amp", "apex.optimizers")
    assert runs(place.execute(prebuilt, LC_ALL=locale, APEX_JIT="0"))
    assert str(folder) in succeeded(place.doctor("optimizers", LC_ALL=locale)).stdout


def test_a_user_with_an_environment_of_its_own(place):
    """pip and kernels, all as somebody who is not root."""
    shutil.rmtree(place.home.parent / "environment" / "share", ignore_errors=True)
    for folder in (place.home, place.python.parent, place.site):
        os.chown(folder, NOBODY, NOBODY)
    where = {"inside": seeing(user=NOBODY, folder=place.home.parent), **COMPILER_ALONE}
    place.install("--no-deps", wheel("apex-amp"), **where)
    assert (place.site / "apex").stat().st_uid == NOBODY
    assert runs(place.execute(AN_OP, APEX_JIT="0", **where))


def test_users_of_one_installation(place, sources, tmp_path):
    """Each compiles into its own folder; what root compiled serves all; nobody trusts another."""
    place.install("--no-deps", sources["apex-amp"])
    succeeded(place.run("chown", "-R", f"{NOBODY}:{NOBODY}", place.home))  # pip used it as root
    where = {"inside": seeing(user=NOBODY, folder=tmp_path), **COMPILER_ALONE}
    first, second = (place.execute(AN_OP, **where) for _ in range(2))
    assert runs(first)
    assert runs(second)
    assert COMPILES in first.stderr
    assert COMPILES not in second.stderr
    kept = place.home / ".cache" / "apex"
    assert (kept.stat().st_uid, kept.stat().st_mode & 0o777) == (NOBODY, 0o700)
    tried = place.execute(AN_OP, APEX_CACHE_DIR=str(kept))
    assert f"{kept} belongs to user {NOBODY}, and this process runs as user 0" in said(tried)

    roots = {"APEX_CACHE_DIR": str(tmp_path / "for all")}
    assert succeeded(place.doctor("amp", "--build", **roots, **COMPILER_ALONE))
    succeeded(place.run("chmod", "-R", "go+rX", tmp_path / "for all"))
    served = place.execute(AN_OP, **roots, **where)
    assert runs(served)
    assert COMPILES not in served.stderr
