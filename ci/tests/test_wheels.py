"""Sdists and wheels: what is in them, and that it does not matter where they are built."""

import json
import re
import sys
import zipfile

import pytest
from environments import NO_KERNELS, PACKAGES, ROOT, build_wheel, copy_checkout, run, unpack

PROJECT = (ROOT / "packages" / "apex-amp" / "pyproject.toml").read_text()
VERSION = re.search(r'^version = "(.+?)"', PROJECT, re.M)[1]


def contents(wheel) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("package", PACKAGES)
def test_sdist_is_self_contained(source_wheels, tmp_path, package):
    """A wheel built from the sdist, far from the checkout, is the one built in the checkout."""
    sdist = build_wheel(ROOT / "packages" / package, tmp_path / "sdist", target="sdist")
    unpacked = unpack(sdist, tmp_path / "elsewhere")
    assert {p.name for p in unpacked.iterdir()} >= {"LICENSE", "README.md", "CHANGELOG.md"}
    assert not (unpacked / "tests").exists()
    wheel = build_wheel(unpacked, tmp_path / "wheel")
    assert wheel.name == source_wheels[package].name
    assert wheel.read_bytes() == source_wheels[package].read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_has_all_it_needs_and_no_more(source_wheels, package):
    names = contents(source_wheels[package])
    main = f"apex/{package.removeprefix('apex-')}"
    assert source_wheels[package].name.endswith("-py3-none-any.whl")
    expected = ["apex/__init__.py", f"{main}/py.typed", f"{main}/_shared/native/library.py"]
    expected += [f"{main}/_shared/include/apex/core/config.h", f"{main}/_ops.py"]
    assert set(expected) <= set(names)
    info = next(n for n in names if n.endswith("/METADATA")).partition("/")[0]
    assert names[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    unwanted = r"(^|/)(tests|benchmarks|emulation|(test|bench)_[^/]*)(/|$)"  # apex has a testing
    assert [n for n in names if re.search(unwanted, n)] == []
    checkout = str(ROOT).encode()
    assert [n for n, data in names.items() if checkout in data] == []


def test_build_version_adds_a_local_part(tmp_path):
    package = ROOT / "packages" / "apex-amp"
    wheel = build_wheel(package, tmp_path, {"BUILD_VERSION": f"{VERSION}+cu130"})
    assert wheel.name == f"apex_amp-{VERSION}+cu130-py3-none-any.whl"
    metadata = contents(wheel)[f"apex_amp-{VERSION}+cu130.dist-info/METADATA"]
    assert f"\nVersion: {VERSION}+cu130\n".encode() in metadata


@pytest.mark.parametrize("foreign", ["3.1.4", f"{VERSION}.dev1", f"{VERSION}1", f"{VERSION}+"])
def test_build_version_of_something_else_is_refused(tmp_path, foreign):
    with pytest.raises(RuntimeError, match=r"BUILD_VERSION is '.*', and this package has version"):
        build_wheel(ROOT / "packages" / "apex-amp", tmp_path, {"BUILD_VERSION": foreign})
    assert list(tmp_path.iterdir()) == []


def test_an_sdist_keeps_its_version(tmp_path):
    package = ROOT / "packages" / "apex-amp"
    sdist = build_wheel(package, tmp_path, {"BUILD_VERSION": f"{VERSION}+a"}, target="sdist")
    wheel = build_wheel(unpack(sdist, tmp_path), tmp_path / "wheel", {"BUILD_VERSION": "9"})
    assert wheel.name == f"apex_amp-{VERSION}+a-py3-none-any.whl"


def test_building_touches_no_file_of_the_checkout(tmp_path):
    checkout = copy_checkout(tmp_path / "checkout")
    before = {f for f in checkout.rglob("*") if ".git" not in f.parts}
    environment = {"PYTHONDONTWRITEBYTECODE": "1"}
    build_wheel(checkout / "packages" / "apex-contrib", tmp_path / "out", environment)
    assert {f for f in checkout.rglob("*") if ".git" not in f.parts} == before


def test_isolated_build_gets_torch_only_when_kernels_are_demanded():
    code = "import hatchling.build as h; print(h.get_requires_for_build_wheel())"

    def requirements(env):
        return run(sys.executable, "-c", code, cwd=ROOT / "packages" / "apex-amp", env=env).stdout

    assert "torch" not in requirements(NO_KERNELS)
    assert "torch>=2.10" in requirements({"APEX_BUILD_CPP_OPS": "1"})
    assert "ninja" in requirements({"APEX_BUILD_CPP_OPS": "1"})
    assert "torch>=2.10" in requirements({"APEX_BUILD_MULTI_TENSOR": "1"})
    not_of_this_wheel = {"APEX_BUILD_STRING": "1", "APEX_BUILD_XENTROPY": "1"}
    assert "torch" not in requirements(NO_KERNELS | not_of_this_wheel)


@pytest.mark.parametrize("package", PACKAGES)
def test_an_sdist_tells_names_of_other_packages_from_misspelt_ones(tmp_path, package):
    sdist = build_wheel(ROOT / "packages" / package, tmp_path, target="sdist")
    unpacked = unpack(sdist, tmp_path / "elsewhere")
    others = dict.fromkeys(("APEX_BUILD_AMP_C", "APEX_BUILD_SYNCBN", "APEX_XENTROPY"), "1")
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); "
        "from native.switches import read_switches; "
        "read_switches(Path(sys.argv[1]).parent, os.environ)"
    )
    (shared,) = unpacked.glob("src/apex/*/_shared")
    run(sys.executable, "-c", code, shared, env=others)
    with pytest.raises(RuntimeError, match=r"SYNCNB .*Did you mean APEX_BUILD_SYNCBN\?"):
        run(sys.executable, "-c", code, shared, env={"APEX_BUILD_SYNCNB": "1"})


def test_what_was_demanded_and_cannot_be_built_fails_the_build(tmp_path):
    """Nothing is dropped silently: here there is no compiler."""
    demanded = {"APEX_BUILD_CPP_OPS": "1", "CXX": "no-such-compiler"}
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        build_wheel(ROOT / "packages" / "apex-contrib", tmp_path, demanded)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.builds
def test_wheel_with_kernels_is_the_same_from_sdist_and_checkout(tmp_path):
    package = ROOT / "packages" / "apex-amp"  # the fewest kernels: they are compiled twice
    demanded = {"APEX_BUILD_CPP_OPS": "1", "APEX_CPU_LEVELS": "baseline"}
    direct = build_wheel(package, tmp_path / "direct", demanded)
    assert "-py3-none-linux_" in direct.name
    sdist = build_wheel(package, tmp_path / "sdist", target="sdist")
    unpacked = unpack(sdist, tmp_path / "elsewhere")
    indirect = build_wheel(unpacked, tmp_path / "indirect", demanded)
    ours, theirs = contents(direct), contents(indirect)
    assert list(ours) == list(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []

    manifest = json.loads(ours["apex/amp/_kernels/manifest.json"])
    assert {e["file"] for e in manifest["libraries"]} == {
        n.rpartition("/")[2] for n in ours if n.endswith(".so")
    }
