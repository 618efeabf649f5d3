"""Which kernels a wheel brings: the switches APEX_BUILD_*, and what the manifest then says."""

import importlib.util
import json
import re
import sys

import pytest
from environments import ROOT

sys.path.insert(0, str(ROOT / "shared_csrc"))

from native import prebuilt, switches, toolchain
from native.errors import BuildError
from native.targets import Target, cpu_levels

ALL = {"adam", "sgd", "scale", "norm"}
SIBLINGS = {"XENTROPY", "FUSED_LAYER_NORM", "AMP_C", "SYNCBN"}


@pytest.fixture
def package(tmp_path):
    """A package with four ops in two import paths, and a legacy module for two of them."""
    for op in ("optimizers/adam", "optimizers/sgd", "multi/scale", "multi/norm"):
        folder = tmp_path / "src" / "apex" / op
        folder.mkdir(parents=True)
        (folder / f"{folder.name}.cpp").write_text("// kernels\n")
    legacy = "from apex.optimizers.adam import step\n\n\ndef f():\n    import apex.multi\n"
    (tmp_path / "src" / "old_C.py").write_text(legacy)
    return tmp_path / "src" / "apex" / "optimizers"


@pytest.fixture
def built(package, tmp_path, monkeypatch):
    """Return a function that says what would be compiled: {target: ops}."""

    def fake_build(ops, targets, folder, *, package, log, portable):
        assert portable, "what goes into a wheel must load on older systems too"
        for target in targets:
            (folder / f"{target.name}.so").write_text("library")
        return {target: folder / f"{target.name}.so" for target in targets}

    def run(**environ):
        monkeypatch.setattr(prebuilt, "build", fake_build)
        output = tmp_path / "_kernels"
        manifest = prebuilt.build_prebuilt(package, output, environ)
        if manifest is None:
            assert not output.exists()
            return None
        assert json.loads((output / "manifest.json").read_text()) == manifest
        assert all((output / entry["file"]).is_file() for entry in manifest["libraries"])
        return {entry["file"]: set(entry["ops"]) for entry in manifest["libraries"]}

    return run


@pytest.fixture
def gpu_torch(tmp_path, monkeypatch):
    """An installed torch that is built for CUDA, and a toolkit."""
    (tmp_path / "torch").mkdir()
    version = "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    (tmp_path / "torch" / "version.py").write_text(version)
    monkeypatch.setattr(toolchain, "torch_root", lambda: tmp_path / "torch")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: sys.executable)


def cpu(ops):
    """What wheels have wherever they are built: a GPU's host code is compiled by g++, too."""
    return {f"cpu-{level}.so": ops for level in cpu_levels()} | {"gpu-rtc.so": ops}


def case_id(value):
    """Id of a case: its switches alone, because sets print differently in every process."""
    if isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
        return ",".join(f"{name}={v!r}" for name, v in value.items()) or "none"
    return None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, cpu(ALL)),
        ({"APEX_BUILD_CPP_OPS": "1"}, cpu(ALL)),
        ({"APEX_BUILD_CPP_OPS": "0"}, None),
        ({"APEX_BUILD_CPP_OPS": ""}, None),
        ({"APEX_BUILD_ADAM": "1"}, cpu({"adam"})),
        ({"APEX_BUILD_ADAM": "1", "APEX_BUILD_SCALE": "1"}, cpu({"adam", "scale"})),
        ({"APEX_BUILD_ADAM": "0"}, cpu(ALL - {"adam"})),
        ({"APEX_BUILD_CPP_OPS": "1", "APEX_BUILD_ADAM": "0"}, cpu(ALL - {"adam"})),
        ({"APEX_BUILD_CPP_OPS": "1", "APEX_BUILD_ADAM": "1"}, cpu(ALL)),
        ({"APEX_BUILD_OLD_C": "1"}, cpu({"adam", "scale", "norm"})),
        ({"APEX_BUILD_OLD_C": "1", "APEX_BUILD_NORM": "0"}, cpu({"adam", "scale"})),
        ({"APEX_BUILD_XENTROPY": "1"}, cpu(ALL)),
        ({"APEX_BUILD_XENTROPY": "1", "APEX_BUILD_CPP_OPS": "0"}, None),
        ({"APEX_BUILD_XENTROPY": "1", "APEX_BUILD_ADAM": "1"}, cpu({"adam"})),
        ({"APEX_BUILD_AMP_C": "0"}, cpu(ALL)),
        ({"APEX_BUILD_IN_NO_PACKAGE": "0"}, cpu(ALL)),
        ({"APEX_BUILD_STRING": "rc1"}, cpu(ALL)),
        ({"APEX_BUILD_STRING": "1", "APEX_BUILD_ADAM": "1"}, cpu({"adam"})),
        ({"APEX_CPP_EXT": "1"}, cpu(ALL)),
        ({"APEX_CPP_EXT": "0"}, cpu(ALL)),
        ({"APEX_CPP_EXT": "1", "APEX_BUILD_CPP_OPS": "0"}, None),
        ({"APEX_CPP_EXT": "1", "APEX_BUILD_ADAM": "1"}, cpu(ALL)),
        ({"APEX_XENTROPY": "1"}, cpu(ALL)),
        ({"APEX_ALL_CONTRIB_EXT": "1"}, cpu(ALL)),
    ],
    ids=case_id,
)
def test_cpu_switches(built, environ, expected):
    assert built(**environ) == expected


@pytest.mark.skipif(len(cpu_levels()) == 1, reason="this kind of machine has one level")
@pytest.mark.parametrize(
    ("named", "levels"),
    [
        ("baseline,x86-64-v4", {"x86-64-v4", "baseline"}),
        ("x86-64-v3 baseline", {"x86-64-v3", "baseline"}),
        ("", set(cpu_levels())),
    ],
)
def test_levels_that_are_named(built, named, levels):
    libraries = built(APEX_BUILD_CPP_OPS="1", APEX_CPU_LEVELS=named)
    assert libraries == {f"cpu-{level}.so": ALL for level in levels} | {"gpu-rtc.so": ALL}


def test_a_level_that_does_not_exist(built):
    with pytest.raises(BuildError, match="APEX_CPU_LEVELS names 'v5', but the levels of"):
        built(APEX_BUILD_CPP_OPS="1", APEX_CPU_LEVELS="v5")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, cpu(ALL) | {"cuda.so": ALL}),
        ({"APEX_BUILD_CUDA_OPS": "1"}, cpu(ALL) | {"cuda.so": ALL}),
        ({"APEX_BUILD_CUDA_OPS": "0"}, cpu(ALL)),
        ({"APEX_BUILD_CUDA_OPS": ""}, cpu(ALL)),
        ({"APEX_BUILD_CUDA_OPS": "1", "APEX_BUILD_CPP_OPS": "0"}, {"cuda.so": ALL}),
        ({"APEX_BUILD_SGD": "1"}, cpu({"sgd"}) | {"cuda.so": {"sgd"}}),
        ({"APEX_BUILD_SGD": "1", "APEX_BUILD_CPP_OPS": "0"}, {"cuda.so": {"sgd"}}),
        ({"APEX_CUDA_EXT": "1", "APEX_BUILD_CPP_OPS": "0"}, {"cuda.so": ALL}),
        ({"APEX_ALL_OPTIMIZERS_EXT": "1", "APEX_BUILD_CPP_OPS": "0"}, {"cuda.so": ALL}),
        ({"APEX_CUDA_EXT": "1", "APEX_BUILD_CUDA_OPS": "0"}, cpu(ALL)),
    ],
    ids=case_id,
)
def test_gpu_switches(built, gpu_torch, environ, expected):
    assert built(**environ) == expected


@pytest.mark.parametrize(
    ("listed", "archs"),
    [
        ("9.0;10.0+PTX", ["sm_90", "sm_100", "compute_100"]),
        ("", ["sm_80", "sm_90", "sm_100", "sm_120", "compute_120"]),
    ],
)
def test_cuda_architectures(built, gpu_torch, tmp_path, listed, archs):
    built(APEX_BUILD_CUDA_OPS="1", TORCH_CUDA_ARCH_LIST=listed)
    manifest = json.loads((tmp_path / "_kernels" / "manifest.json").read_text())
    (entry,) = [e for e in manifest["libraries"] if e["backend"] == "cuda"]
    assert entry["archs"] == archs


@pytest.mark.parametrize(
    ("backend", "said", "major"),
    [
        ("cuda", "Cuda compilation tools, release 13.0, V13.0.88", 13),
        ("hip", "HIP version: 6.4.43483-a187df25c", 6),
        ("cuda", "no version at all", None),
        ("cpu", "g++ release 12.2", None),
    ],
)
def test_the_manifest_has_the_toolkits_major_version(monkeypatch, backend, said, major):
    monkeypatch.setattr(toolchain, "compiler_for", lambda backend: ["compiler"])
    monkeypatch.setattr(toolchain, "compiler_version", lambda compiler: said)
    assert prebuilt._entry(Target(backend), [])["toolkit"] == major


def test_hipcc_is_asked_for_its_own_version_alone(tmp_path):
    """Without HIP_PLATFORM it runs nvcc, where there is one, and says what that says."""
    hipcc = tmp_path / "hipcc"
    hipcc.write_text('#!/bin/sh\necho HIP 6.4\n[ "$HIP_PLATFORM" = amd ] || echo nvcc\n')
    hipcc.chmod(0o755)
    assert toolchain.compiler_version([str(hipcc)]) == "HIP 6.4"


def test_isolated_build_without_torch(built, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert built() is None


@pytest.mark.parametrize("switch", ["APEX_BUILD_CPP_OPS", "APEX_BUILD_CUDA_OPS"])
def test_demanded_without_torch_fails(package, tmp_path, monkeypatch, switch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"torch is not installed|nvcc was not found"):
        prebuilt.build_prebuilt(package, tmp_path / "_kernels", {switch: "1"})
    assert not (tmp_path / "_kernels").exists()


def test_missing_compiler_is_said_aloud(built, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert built() is None
    assert "will bring no cpu kernels" in capsys.readouterr().err


def test_says_what_is_compiled(built, capsys):
    built(APEX_BUILD_ADAM="1", APEX_BUILD_CUDA_OPS="0")
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"apex\.optimizers: compiling adam for cpu-[\w, -]+", lines[0])
    assert lines[1:] == ["apex.optimizers: compiled in 0 s"]


def test_a_misspelt_op_fails_with_the_right_name(built):
    with pytest.raises(
        BuildError,
        match=r"optimizers: APEX_BUILD_SCLAE demands kernels, but no Apex package has .* SCLAE\. "
        r"Did you mean APEX_BUILD_SCALE\? This package has ADAM, NORM, OLD_C, SCALE, SGD\.",
    ):
        built(APEX_BUILD_SCLAE="1", APEX_BUILD_ADAM="1")


def test_an_extension_of_nvidia_that_is_not_here_fails(built):
    with pytest.raises(BuildError, match=r"APEX_CUDNN_GBN demands kernels, but no Apex package"):
        built(APEX_CUDNN_GBN="1")


@pytest.mark.parametrize(
    "off",
    [
        ("APEX_BUILD_CPP_OPS",),
        ("APEX_BUILD_CPP_OPS", "APEX_BUILD_CUDA_OPS"),
        ("APEX_BUILD_OLD_C",),
    ],
    ids=" ".join,
)
def test_demanded_and_forbidden_fails(built, off):
    """Here is no compiler for a GPU that could take the CPU's place."""
    named = " and ".join(off)
    with pytest.raises(BuildError, match=rf"APEX_BUILD_ADAM demands .* {named} switched off"):
        built(APEX_BUILD_ADAM="1", **dict.fromkeys(off, "0"))


def test_a_checkout_knows_the_names_of_all_packages():
    assert switches.known_names() >= SIBLINGS


@pytest.mark.parametrize("value", ["0", "1"])
def test_a_module_without_kernels_demands_none(value):
    package = ROOT / "packages" / "apex-parallel" / "src" / "apex" / "parallel"
    assert switches.read_switches(package, {"APEX_BUILD_APEX_C": value}) == switches.Switches()


def test_an_sdist_knows_what_is_listed_in_it(built, tmp_path, monkeypatch):
    """It lies alone; without the list no name of another package is known."""
    monkeypatch.setattr(switches, "SHARED", tmp_path)
    with pytest.raises(BuildError, match="no Apex package has an op or a module XENTROPY"):
        built(APEX_BUILD_XENTROPY="1")
    (tmp_path / switches.NAMES_FILE).write_text("SYNCBN\nXENTROPY\n")
    assert built(APEX_BUILD_XENTROPY="1") == cpu(ALL)
