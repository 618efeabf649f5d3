"""ci/check_wheel.py finds what would keep a wheel from installing or loading where torch does."""

import argparse
import subprocess
import zipfile

import pytest

from ci import check_wheel
from ci.workspace import PACKAGES, wheel

LOCAL = argparse.Namespace(local=True, torch=None)


def library(folder, source, *flags):
    """Compile a small library that has only the fault under test."""
    (folder / "source.cpp").write_text(source)
    path = folder / "library.so"
    script = folder / "script"
    script.write_text("{ local: *; };")
    own = ["-shared", "-fPIC", "-O2", "-Wl,--strip-all", f"-Wl,--version-script={script}"]
    command = ["g++", *own, folder / "source.cpp", *flags, "-o", path]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return path


@pytest.mark.parametrize("package", PACKAGES)
def test_our_own_wheels_pass(package):
    assert list(check_wheel.tools(wheel(package))) == []
    assert list(check_wheel.wheel_complaints(wheel(package), LOCAL)) == []


def test_a_library_without_fault_passes(tmp_path):
    path = library(tmp_path, "static int f() { return 1; }\nint g() { return f(); }")
    assert list(check_wheel.library_complaints(path, None)) == []


def test_a_function_of_a_newer_c_library_is_found(tmp_path):
    source = '#include <math.h>\nextern "C" double f(double x) { return pow(x, x); }'
    path = library(tmp_path, source)
    command = ["g++", "-shared", "-fPIC", "-s", tmp_path / "source.cpp", "-o", path]
    subprocess.run(list(map(str, command)), check=True)
    said = list(check_wheel.library_complaints(path, None))
    assert any("needs GLIBC_2.29, which is newer than manylinux_2_28" in each for each in said)
    assert any(each.startswith("exports f") for each in said)


def test_debug_data_search_paths_and_foreign_libraries_are_found(tmp_path):
    (tmp_path / "empty.cpp").write_text("")
    foreign = tmp_path / "libforeign.so"
    command = ["g++", "-shared", "-fPIC", "-o", foreign, tmp_path / "empty.cpp"]
    subprocess.run(list(map(str, command)), check=True)
    flags = ["-Wl,--no-as-needed", f"-L{tmp_path}", "-lforeign", "-Wl,-rpath,/nowhere"]
    path = library(tmp_path, "int g() { return 1; }", *flags)
    said = list(check_wheel.library_complaints(path, None))
    assert said == ["needs libforeign.so", "looks for libraries in /nowhere"]
    subprocess.run(["g++", "-shared", "-g", "-o", path, tmp_path / "source.cpp"], check=True)
    assert "is not stripped" in list(check_wheel.library_complaints(path, None))


def test_a_symbol_that_the_oldest_torch_lacks_is_found(tmp_path):
    source = 'extern "C" int torch_new(); int (*kept)() __attribute__((used)) = torch_new;'
    path = library(tmp_path, source)
    assert list(check_wheel.library_complaints(path, {"torch_new"})) == []
    (said,) = check_wheel.library_complaints(path, {"torch_old"})
    assert said.startswith("takes torch_new from torch")


def test_the_stream_of_a_gpu_is_not_looked_for_in_a_torch_for_cpus(tmp_path):
    (name,) = check_wheel.GPU_SYMBOLS
    path = library(tmp_path, f'extern "C" int {name}(); int g() {{ return {name}(); }}')
    assert list(check_wheel.library_complaints(path, {"torch_new"})) == []


@pytest.mark.parametrize(
    ("tag", "has_libraries", "local", "is_right"),
    [
        ("py3-none-any", False, False, True),
        ("py3-none-any", True, False, False),
        ("py3-none-manylinux_2_28_x86_64", True, False, True),
        ("py3-none-manylinux_2_27_aarch64.manylinux_2_28_aarch64", True, False, True),
        ("py3-none-manylinux_2_35_x86_64", True, False, False),
        ("py3-none-linux_x86_64", True, False, False),
        ("py3-none-linux_x86_64", True, True, True),
        ("cp311-cp311-manylinux_2_28_x86_64", True, False, False),
        ("py3-none-manylinux_2_28_x86_64", False, False, False),
    ],
)
def test_tags(tag, has_libraries, local, is_right):
    said = list(check_wheel.tag_complaints(f"apex_amp-1.0.0-{tag}.whl", has_libraries, local))
    assert (said == []) is is_right


def test_metadata_names_its_licence_and_links_that_work_elsewhere(tmp_path):
    text = "Summary: s\nLicense-Expression: BSD-3-Clause\nLicense-File: LICENSE\n"
    text += "Requires-Python: >=3.10\nClassifier: c\n\n[here](docs/a.md) [there](https://a.b)"
    said = list(check_wheel.metadata_complaints(text, tmp_path))
    assert said[0] == "METADATA names LICENSE, which is not in the wheel"
    assert said[1].startswith("README links to docs/a.md")
    assert "METADATA has no Summary" in list(check_wheel.metadata_complaints("\n", tmp_path))


def test_a_wheel_above_the_budget_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(check_wheel, "SIZE_BUDGET_MIB", 0.001)
    path = tmp_path / "apex_amp-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("apex_amp-1.0.0.dist-info/METADATA", "x" * 4096)
    said = list(check_wheel.wheel_complaints(path, LOCAL))
    assert any(each.startswith("has 0 MiB, more than") for each in said)
