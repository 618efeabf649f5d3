"""Ops are compiled wherever they lie, by whatever compiler is named, for one kind of machine."""

import platform
import re
import shutil
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SHARED.parent))

from shared_csrc.native import build, toolchain  # noqa: E402
from shared_csrc.native.errors import BuildError  # noqa: E402
from shared_csrc.native.targets import Target  # noqa: E402

CPU = Target("cpu", "baseline")


def write_op(folder: Path) -> build.Op:
    """An op that needs a header of its own and one of ours, but none of torch."""
    folder.mkdir(parents=True)
    (folder / "my_op.h").write_text("constexpr int kOne = 1;\n")
    source = '#include "apex/core/config.h"\n#include "my_op.h"\nint one() { return kOne; }\n'
    (folder / "my_op.cpp").write_text(source)
    return build.Op("my_op", folder)


@pytest.fixture
def op(tmp_path):
    return write_op(tmp_path / "my_op")


@pytest.mark.parametrize("name", ["with space", "it's $HOME & more", "plain"])
def test_compiles_below_any_folder(tmp_path, monkeypatch, name):
    place = tmp_path / name
    op = write_op(place / "my_op")
    shutil.copytree(toolchain.INCLUDE / "apex" / "core", place / "include" / "apex" / "core")
    torch = place / "torch"
    torch.symlink_to(toolchain.torch_root(), target_is_directory=True)
    monkeypatch.setattr(toolchain, "INCLUDE", place / "include")
    monkeypatch.setattr(toolchain, "torch_root", lambda: torch)

    built = build.build([op], [CPU], place / "out", package="apex.test")[CPU]
    assert str(place).encode() not in built.read_bytes()  # -ffile-prefix-map has whole paths
    before = built.stat().st_mtime_ns
    build.build([op], [CPU], place / "out", package="apex.test")
    assert built.stat().st_mtime_ns == before  # and ninja has found what the compiler has read


def test_a_launcher_that_makes_paths_relative_changes_no_byte(tmp_path, monkeypatch):
    """As ccache does, so that a wheel is the same with and without it."""
    op = write_op(tmp_path / "place" / "my_op")
    op.sources[0].write_text(
        '#include "apex/core/config.h"\n#include "my_op.h"\n'
        "const char* here() { return __FILE__; }\n"
    )
    (op.folder / "my_op.h").write_text("inline const char* header() { return __FILE__; }\n")
    op.sources[0].write_text(op.sources[0].read_text() + "const char* h() { return header(); }\n")
    plain = build.build([op], [CPU], tmp_path / "place" / "one", package="apex.test")[CPU]
    launcher = tmp_path / "launcher"
    launcher.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "def near(word):\n"
        "    for flag in ('-I', ''):\n"
        f"        if word.startswith(flag + {str(tmp_path)!r}):\n"
        "            return flag + os.path.relpath(word[len(flag):])\n"
        "    return word\n"
        "os.execvp(sys.argv[1], [near(word) for word in sys.argv[1:]])\n"
    )
    launcher.chmod(0o755)
    monkeypatch.setenv("APEX_COMPILER_LAUNCHER", str(launcher))
    other = build.build([op], [CPU], tmp_path / "place" / "two", package="apex.test")[CPU]
    assert plain.read_bytes() == other.read_bytes()
    assert b"my_op/my_op.h" in plain.read_bytes()


def test_nvcc_of_the_package_index_links_with_its_own_runtime(tmp_path, monkeypatch):
    """It lies in lib there, and nvcc itself looks into lib64."""
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: str(tmp_path / "bin" / "nvcc"))
    assert f"-L{tmp_path / 'lib'}" not in toolchain.link_flags(Target("cuda"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudart_static.a").touch()
    assert f"-L{tmp_path / 'lib'}" in toolchain.link_flags(Target("cuda"))


def test_nvcc_compiles_below_a_folder_with_a_space(tmp_path):
    """nvcc hands flags for the host compiler to a second shell."""
    try:
        toolchain.compiler_for("cuda")
    except BuildError as error:
        pytest.skip(str(error))
    op = write_op(tmp_path / "with space" / "my_op")
    target = Target("cuda", archs=("sm_90",))
    built = build.build([op], [target], tmp_path / "out put", package="apex.test")[target]
    content = built.read_bytes()
    for place in (op.folder, toolchain.torch_root(), toolchain.INCLUDE):
        assert str(place).encode() not in content


def test_a_failed_build_names_the_file_with_all_output(op, tmp_path):
    op.source.write_text("#error on purpose\n" + "#error again\n" * 30 + "#error last\n")
    log = tmp_path / "a log"
    with pytest.raises(BuildError, match=f"on purpose(?s:.)*Full output: {log}$") as caught:
        build.build([op], [CPU], tmp_path / "out", package="apex.test", log=log)
    assert "#error last" not in str(caught.value)
    assert "#error last" in log.read_text()


def test_the_digest_tells_machines_apart(op, monkeypatch):
    """A home folder may be shared by x86-64 and arm64, with one compiler's version text."""
    target = Target("cuda", archs=("sm_90",))
    monkeypatch.setattr(toolchain, "compiler_for", lambda backend: [sys.executable])
    here = {target: build.digest(op, target) for target in (CPU, target)}
    assert here == {target: build.digest(op, target) for target in here}
    monkeypatch.setattr(platform, "machine", lambda: "sparc64")
    assert [target.name for target in here if here[target] == build.digest(op, target)] == []


@pytest.fixture
def launcher(tmp_path):
    """A program that notes that it ran, and then runs the command it is given, as ccache does."""
    program = tmp_path / "launch er"
    program.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/launched\nexec "$@"\n')
    program.chmod(0o755)
    return program


def test_a_compiler_may_have_a_launcher_and_flags(op, launcher, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    (cxx,) = toolchain.find_cxx()
    plain = build.digest(op, CPU)
    monkeypatch.setenv("CXX", f"'{launcher}' {cxx} -DAPEX_PROBE")
    assert toolchain.find_cxx() == [str(launcher), cxx, "-DAPEX_PROBE"]
    assert build.digest(op, CPU) != plain  # flags may change the library
    op.source.write_text("#ifndef APEX_PROBE\n#error flag\n#endif\n")
    assert build.build([op], [CPU], tmp_path / "out", package="apex.test")[CPU].is_file()
    assert set((tmp_path / "launched").read_text().split()) == {cxx}


def test_a_launcher_starts_the_compilers_of_all_backends(op, launcher, tmp_path, monkeypatch):
    plain = build.digest(op, CPU)
    monkeypatch.setenv("APEX_COMPILER_LAUNCHER", f"'{launcher}'")
    assert build.digest(op, CPU) == plain  # the library is the same
    assert build.build([op], [CPU], tmp_path / "out", package="apex.test")[CPU].is_file()
    launched = set((tmp_path / "launched").read_text().split())
    assert launched == set(toolchain.find_cxx())
    assert any(f"{launcher}' " in line for line in build._emulator_rules())  # compiled for each op


def test_a_compiler_may_be_a_path_with_spaces(launcher, monkeypatch):
    monkeypatch.setenv("CXX", str(launcher))
    assert toolchain.find_cxx() == [str(launcher)]


@pytest.mark.parametrize("wanted", ["no-such-compiler", "no-such-launcher g++", "g++ 'open"])
def test_a_compiler_that_is_not_there(monkeypatch, wanted):
    monkeypatch.setenv("CXX", wanted)
    with pytest.raises(BuildError, match=re.escape(f"looked for CXX={wanted}). Install one")):
        toolchain.find_cxx()


@pytest.mark.parametrize(
    ("archs", "expected"),
    [
        (("sm_75",), ["arch=compute_75,code=sm_75"]),
        (("sm_86",), ["arch=compute_80,code=sm_86"]),
        (
            ("sm_90", "sm_120", "compute_120"),
            [
                "arch=compute_80,code=sm_90",
                "arch=compute_80,code=sm_120",
                "arch=compute_120,code=compute_120",
            ],
        ),
        (("sm_90a", "sm_100f"), ["arch=compute_90a,code=sm_90a", "arch=compute_100f,code=sm_100f"]),
    ],
    ids=["Turing", "Ampere", "newer", "of one GPU alone"],
)
def test_code_for_several_gpus_shares_one_translation(archs, expected):
    flags = toolchain.compile_flags(Target("cuda", archs=archs))
    assert [flag for flag in flags if flag.startswith("arch=")] == expected


@pytest.mark.parametrize(
    ("ptx", "archs", "expected"),
    [
        (90, ("sm_75", "sm_86"), ["arch=compute_75,code=sm_75", "arch=compute_80,code=sm_86"]),
        (90, ("sm_90", "sm_120"), ["arch=compute_90,code=sm_90", "arch=compute_90,code=sm_120"]),
        (100, ("sm_90", "sm_103"), ["arch=compute_80,code=sm_90", "arch=compute_100,code=sm_103"]),
        (90, ("sm_90a",), ["arch=compute_90a,code=sm_90a"]),
    ],
    ids=["older", "newer", "between", "of one GPU alone"],
)
def test_newer_code_is_for_the_gpus_that_have_it(ptx, archs, expected):
    flags = toolchain.compile_flags(Target("cuda", archs=archs), ptx)
    assert [flag for flag in flags if flag.startswith("arch=")] == expected


@pytest.mark.parametrize("asked", ["", "sm_90", "9.0", "90, 100"])
def test_what_a_source_asks_for_is_a_number(op, tmp_path, asked):
    op.source.write_text(f"#define APEX_PTX {asked} // why\n")
    message = rf"my_op\.cpp: expected a compute capability .*APEX_PTX 90`, got '{asked}'"
    with pytest.raises(BuildError, match=message):
        build.build([op], [Target("cpu")], tmp_path / "out", package="apex.test")


def test_a_source_that_asks_is_another_library(op, monkeypatch):
    monkeypatch.setattr(toolchain, "compiler_for", lambda backend: [sys.executable])
    target = Target("cuda", archs=("sm_90",))
    (op.folder / "more.cpp").write_text("// #define APEX_PTX 90\nint APEX_PTX_ = 1;\n")
    assert [toolchain.newest_ptx(source) for source in op.sources] == [80, 80]
    (op.folder / "more.cpp").write_text("#define APEX_PTX  90 // clusters\n")
    assert [toolchain.newest_ptx(source) for source in op.sources] == [80, 90]
    before = build.digest(op, target)
    monkeypatch.setattr(toolchain, "newest_ptx", lambda source: 80)
    assert build.digest(op, target) != before


NEWER = """{asks}
#include "apex/core/config.h"
#if __CUDA_ARCH__ >= 900
__device__ const char translated[] = "translated from compute_90";
#elif defined(__CUDA_ARCH__)
__device__ const char translated[] = "translated from compute_80";
#else
__device__ const char translated[] = "";
#endif
__global__ void wait(char* out) {{
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("barrier.cluster.arrive;\\n barrier.cluster.wait;" ::: "memory");
#endif
  *out = translated[threadIdx.x];
}}
"""


@pytest.mark.parametrize(
    ("asks", "arch", "translated"),
    [("", "sm_90", 80), ("#define APEX_PTX 90", "sm_90", 90), ("#define APEX_PTX 90", "sm_80", 80)],
)
def test_clusters_and_dependent_launches_are_reached_where_asked_for(
    op, tmp_path, monkeypatch, asks, arch, translated
):
    try:
        toolchain.compiler_for("cuda")
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-no-compress")  # so that strings can be read
    op.source.write_text(NEWER.format(asks=asks))
    target = Target("cuda", archs=(arch,))
    built = build.build([op], [target], tmp_path / "out", package="apex.test")[target]
    found = re.findall(rb"translated from compute_(\d+)", built.read_bytes())
    assert {int(number) for number in found} == {translated}


def test_headers_of_a_variant_come_before_ours(op, tmp_path):
    header = tmp_path / "variant" / "apex" / "core" / "config.h"
    header.parent.mkdir(parents=True)
    header.write_text("#error of the variant\n")
    build.build([op], [CPU], tmp_path / "out", package="apex.test")
    with pytest.raises(BuildError, match="of the variant"):
        build.build(
            [op], [CPU], tmp_path / "out", package="apex.test", headers=tmp_path / "variant"
        )
