"""The emulated GPU is chosen by APEX_EMULATE alone, and only where its sources are."""

import re
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SHARED.parent))

from shared_csrc.native import build, jit, prebuilt, switches, targets, toolchain  # noqa: E402
from shared_csrc.native.errors import BuildError  # noqa: E402

EMULATOR = SHARED / "emulation"
EMULATED = targets.Target("emu")


@pytest.mark.parametrize("lanes", ["32", "64"])
def test_cpu_tensors_are_served_by_emulated_kernels(lanes, monkeypatch):
    monkeypatch.setenv("APEX_EMULATE", lanes)
    assert jit.target_of("cpu") == EMULATED
    assert EMULATED.name == "emu"


@pytest.mark.parametrize("value", [None, ""])
def test_not_by_default(value, monkeypatch):
    monkeypatch.delenv("APEX_EMULATE", raising=False)
    if value is not None:
        monkeypatch.setenv("APEX_EMULATE", value)
    assert jit.target_of("cpu").backend == "cpu"


@pytest.mark.parametrize("value", ["1", "0", "16", "true"])
def test_other_widths_are_refused(value, monkeypatch):
    monkeypatch.setenv("APEX_EMULATE", value)
    with pytest.raises(ValueError, match=r"APEX_EMULATE must be 32 or 64 .*got"):
        jit.target_of("cpu")


def test_wheels_bring_none(monkeypatch):
    """Neither prebuilt kernels nor the emulator's sources, whatever the environment says."""
    monkeypatch.setenv("APEX_EMULATE", "32")
    asked = switches.Switches(groups={switches.CPP: True, switches.CUDA: False})
    wanted = prebuilt._wanted_targets(asked, {"APEX_EMULATE": "32"})
    assert {target.backend for target in wanted} == {"cpu", "gpu-rtc"}
    assert EMULATOR.is_dir()  # beside what a wheel takes, not in it


def test_product_headers_do_not_know_it():
    headers = sorted((SHARED / "include").rglob("*.h"))
    assert headers
    assert [h.name for h in headers if re.search(r"emulat|APEX_EMU", h.read_text(), re.I)] == []


def test_an_installed_wheel_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "EMULATION", tmp_path / "emulation")
    folder = tmp_path / "my_op"
    folder.mkdir()
    (folder / "my_op.cpp").write_text("")
    with pytest.raises(BuildError, match=r"APEX_EMULATE is set, but .* work in a checkout"):
        build.build([build.Op("my_op", folder)], [EMULATED], tmp_path / "out", package="apex.test")
