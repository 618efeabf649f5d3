"""What the doctor makes of file systems and variables that a test machine does not have."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared_csrc.native import doctor, doctor_rtc, drivers, targets
from shared_csrc.native.library import OpLibrary


def test_a_file_system_that_forbids_running_code(tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "not" / "yet"))
    assert doctor._cache()["problem"] is None
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert doctor._cache()["problem"] == (
        f"the file system of {tmp_path} forbids running code (noexec)"
    )


def test_a_user_without_a_home(monkeypatch):
    for name in ("APEX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert "APEX_CACHE_DIR" in doctor._cache()["problem"]


@pytest.mark.parametrize(
    ("torch_for", "variables", "expected"),
    [
        ({}, {}, None),
        ({"cuda": "13.0"}, {}, None),
        ({}, {"TORCH_CUDA_ARCH_LIST": "9.0"}, None),
        ({"cuda": "13.0"}, {"TORCH_CUDA_ARCH_LIST": "8.0 9.0a"}, ("cuda", ("sm_80", "sm_90a"))),
        ({"hip": "6.4"}, {"PYTORCH_ROCM_ARCH": "gfx90a;gfx942"}, ("hip", ("gfx90a", "gfx942"))),
    ],
)
def test_images_are_made_for_the_gpus_that_are_named(monkeypatch, torch_for, variables, expected):
    monkeypatch.setenv("APEX_CUDA_COMPILER", "nvcc")
    monkeypatch.setenv("APEX_HIP_COMPILER", "hipcc")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, torch_for.get(name))
    for name in ("TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH"):
        monkeypatch.setenv(name, variables.get(name, ""))
    cpu, *others = (target for target, _ in doctor._wanted_targets(OpLibrary("apex_doc", __file__)))
    assert cpu.backend == "cpu"
    wanted = [] if expected is None else [targets.Target(expected[0], archs=expected[1])]
    assert others == wanted


@pytest.mark.parametrize(
    ("cuda", "libraries", "expected"),
    [
        (None, [], None),
        ("12.6", [], "an op's host code is compiled at its first call; 1 kernels of NVRTC in the"),
        (
            "13.0",
            [("cpu", []), ("cuda", ["sm_80", "sm_90"]), ("gpu-rtc", [])],
            "cuda.so for sm_80, sm_90 and gpu-rtc.so for all; 1 kernels of NVRTC in the cache",
        ),
    ],
)
def test_what_serves_nvidia_gpus(monkeypatch, tmp_path, cuda, libraries, expected):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    (tmp_path / "nvrtc-13.0-sm_90").mkdir()
    (tmp_path / "nvrtc-13.0-sm_90" / "my_op-1.kernel").write_text("")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    ops = OpLibrary("apex_doc", __file__)
    entries = [{"file": f"{b}.so", "backend": b, "archs": archs} for b, archs in libraries]
    monkeypatch.setattr(ops, "manifest", lambda: {"libraries": entries})
    assert (doctor_rtc.on_gpus(ops) or "").startswith(expected or "")
    monkeypatch.setattr(drivers.CudaDriver, "version", lambda self: 13020)
    monkeypatch.setattr(drivers, "driver", lambda: object.__new__(drivers.CudaDriver))
    said = doctor_rtc.on_gpus(ops)
    assert said is None if cuda is None else said.endswith("cache; libcuda.so.1 of CUDA 13.2")


def test_what_serves_amd_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx90a:xnack-;gfx1100 gfx90a")
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    (tmp_path / "hiprtc-6.4.43482-gfx942").mkdir()
    (tmp_path / "hiprtc-6.4.43482-gfx942" / "my_op-1.kernel").write_text("")
    ops = OpLibrary("apex_doc", __file__)
    backends = {"cuda": ["sm_90"], "hip": ["gfx90a"], "gpu-rtc": []}
    entries = [{"file": f"{b}.so", "backend": b, "archs": a} for b, a in backends.items()]
    monkeypatch.setattr(ops, "manifest", lambda: {"libraries": entries})
    monkeypatch.setattr(drivers.HipDriver, "version", lambda self: 60443482)
    monkeypatch.setattr(drivers, "driver", lambda: object.__new__(drivers.HipDriver))
    assert doctor_rtc.on_gpus(ops) == (
        "hip.so for gfx90a and gpu-rtc.so for all; 1 kernels of HIPRTC in the cache; "
        "libamdhip64.so of ROCm 6.4"
    )
    assert doctor_rtc.architectures() == ["gfx90a", "gfx1100"]
    monkeypatch.setenv("APEX_HIP_COMPILER", "hipcc")
    assert doctor_rtc.architectures() == []


def test_a_missing_compiler_is_a_trouble_of_build(monkeypatch):
    def missing():
        raise doctor_rtc.BuildError("libnvrtc.so.13 was not found.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(drivers, "compiler", missing)
    options = SimpleNamespace(compile=None, build=True)
    (trouble,) = doctor._compile_kernels(OpLibrary("apex_doc", __file__), options)
    assert trouble.what == "GPU kernels: libnvrtc.so.13 was not found."


def test_no_driver(monkeypatch):
    def missing():
        raise doctor_rtc.BuildError("NVIDIA's driver cannot be loaded: no libcuda.so.1.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(drivers, "driver", missing)
    said = doctor_rtc.on_gpus(OpLibrary("apex_doc", __file__))
    assert said.endswith("in the cache; NVIDIA's driver cannot be loaded: no libcuda.so.1")


@pytest.mark.parametrize(("nvcc", "cuda", "is_wrong"), [(13, "12.8", True), (12, "13.0", False)])
def test_a_compiler_newer_than_torch(monkeypatch, nvcc, cuda, is_wrong):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor.toolchain, "toolkit_major", lambda backend: nvcc)
    assert (doctor._toolkit_problem() is not None) == is_wrong
