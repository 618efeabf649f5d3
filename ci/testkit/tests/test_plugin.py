"""Devices are chosen openly, tests are seeded, and no skip hides a missing kernel."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTKIT = Path(__file__).parents[1]


def run_pytest(folder, source, *arguments) -> subprocess.CompletedProcess:
    """Run pytest with the plugin on one file of ``source``, in a process and folder of its own."""
    (folder / "pytest.ini").write_text(
        f"[pytest]\naddopts = -p apex_testkit.plugin --strict-markers\npythonpath = {TESTKIT}\n"
    )
    (folder / "test_case.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "test_case.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_device_is_one_that_exists(device):
    assert torch.ones(2, device=device).sum().item() == 2


def test_seeded_before_every_test():
    first = torch.randn(3)
    torch.manual_seed(0)
    assert torch.equal(first, torch.randn(3))


def test_two_threads():
    assert torch.get_num_threads() == 2


def test_a_device_that_is_absent_or_unknown_is_refused(tmp_path):
    done = run_pytest(tmp_path, "def test(device): pass", "--device", "tpu")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "got 'tpu'" in done.stderr
    if not torch.cuda.is_available():
        done = run_pytest(tmp_path, "def test(device): pass", "--device", "cuda")
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert "finds no such device" in done.stderr


def test_device_tests_only(tmp_path):
    source = """
import pytest

def test_device(device): pass
def test_plain(): pass
@pytest.mark.needs_gpus(1000)
def test_gpus(): pass
"""
    options = ("--device", "cpu", "--device-tests-only")
    output = run_pytest(tmp_path, source, *options).stdout
    assert "1 passed, 1 skipped, 1 deselected" in output, output
    assert "PASSED test_case.py::test_device" in output


def test_skips(tmp_path):
    source = """
import pytest

class BuildError(RuntimeError):
    pass

def behind(error):
    try:
        raise error
    except Exception:
        pytest.skip("no kernel here")

def test_import(): pytest.importorskip("never_built_cuda")
def test_import_sub(): pytest.importorskip("apex.nothing_here")
def test_build(): behind(BuildError("compiling failed"))
def test_kernel(): behind(NotImplementedError("no kernel for cpu"))
@pytest.mark.builds
def test_marked(): pytest.skip("no compiler")
def test_foreign_ok(): pytest.importorskip("no_such_foreign_package")
def test_honest_ok(): pytest.skip("needs another system")
@pytest.mark.needs_gpus(1000)
def test_gpus_ok(): raise AssertionError
@pytest.mark.xfail(strict=True)
def test_xfail_ok(): raise AssertionError
"""
    done = run_pytest(tmp_path, source)
    lines = done.stdout.splitlines()
    failed = sorted(line.split("::")[1].split()[0] for line in lines if line.startswith("FAILED"))
    expected = ["test_build", "test_import", "test_import_sub", "test_kernel", "test_marked"]
    assert failed == expected, done.stdout
    assert "hides a missing kernel: BuildError: compiling failed" in done.stdout
    assert "5 failed, 3 skipped, 1 xfailed" in done.stdout


def test_a_skipped_module_that_hides_a_kernel_fails(tmp_path):
    done = run_pytest(
        tmp_path, "import pytest\npytest.importorskip('never_built_cuda')\ndef test(): pass"
    )
    assert done.returncode != 0, done.stdout
    assert "the module never_built_cuda is missing" in done.stdout
