"""First-use builds: which GPUs they are for, and what is said where the cache cannot be used."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SHARED = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SHARED.parent))

from shared_csrc.native import build, compatibility, jit, library, nvrtc, targets, toolchain  # noqa: E402
from shared_csrc.native.errors import BuildError  # noqa: E402

CPU = targets.Target("cpu", "baseline")


@pytest.fixture
def op(tmp_path):
    folder = tmp_path / "my_op"
    folder.mkdir()
    (folder / "my_op.cpp").write_text("// kernels\n")
    return build.Op("my_op", folder)


@pytest.fixture
def h100(monkeypatch):
    monkeypatch.setenv("APEX_CUDA_COMPILER", "nvcc")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.fixture
def mi210(monkeypatch):
    monkeypatch.setenv("APEX_HIP_COMPILER", "hipcc")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    properties = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)


@pytest.mark.parametrize(
    ("listed", "archs"),
    [
        ("", ("sm_90",)),
        ("native", ("sm_90",)),
        ("9.0", ("sm_90",)),
        ("9.0a", ("sm_90a",)),
        ("8.0", ("sm_80", "sm_90")),
        ("10.0", ("sm_100", "sm_90")),
        ("8.0+PTX", ("sm_80", "compute_80")),
        ("Hopper", ("sm_90", "compute_90")),
        ("Ampere+Tegra;Ada", ("sm_87", "sm_89", "compute_89")),
    ],
)
def test_the_card_that_is_there_is_always_compiled_for(h100, monkeypatch, listed, archs):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert jit.target_of("cuda").archs == archs


@pytest.mark.parametrize(
    ("listed", "archs"),
    [
        ("", ("gfx90a",)),
        ("gfx90a;gfx942", ("gfx90a", "gfx942")),
        ("gfx90a:xnack-", ("gfx90a:xnack-",)),
        ("gfx942 gfx1100", ("gfx942", "gfx1100", "gfx90a")),
    ],
)
def test_the_amd_card_too(mi210, monkeypatch, listed, archs):
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", listed)
    assert jit.target_of("cuda") == targets.Target("hip", archs=archs)


@pytest.mark.parametrize("listed", ["", "8.0", "nine"])
def test_nvrtc_serves_every_nvidia_card(h100, monkeypatch, listed):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    for value in ("", "nvrtc"):
        monkeypatch.setenv("APEX_CUDA_COMPILER", value)
        assert jit.target_of("cuda") == targets.Target("gpu-rtc")


@pytest.mark.parametrize(
    ("wanted", "there", "taken"),
    [
        ("", "both", "cuda.so"),  # what somebody took minutes to compile
        ("", "gpu-rtc.so", "gpu-rtc.so"),
        ("", "another card's", "gpu-rtc.so"),
        ("nvrtc", "both", "gpu-rtc.so"),
        ("nvrtc", "cuda.so", None),
        ("nvcc", "both", "cuda.so"),
        ("nvcc", "gpu-rtc.so", None),
    ],
)
def test_which_library_of_a_wheel_is_taken(op, h100, tmp_path, monkeypatch, wanted, there, taken):
    monkeypatch.setenv("APEX_CUDA_COMPILER", wanted)
    monkeypatch.setattr(compatibility, "compiler", lambda: None)
    entries = [
        {"file": f"{backend}.so", "backend": backend, "archs": archs, "ops": ["my_op"]}
        for backend, archs in (("cuda", ["sm_90"]), ("gpu-rtc", []))
    ]
    if there == "another card's":
        entries[0]["archs"] = ["sm_80"]
    elif there != "both":
        entries = [entry for entry in entries if entry["file"] == there]
    ops = library.OpLibrary("apex_first_use", str(tmp_path / "_ops.py"))
    monkeypatch.setattr(ops, "manifest", lambda: {"libraries": entries})
    found = ops.find_prebuilt(op, "cuda")
    assert (found and found.name) == taken


def test_a_torch_without_nvrtc(op, h100, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_CUDA_COMPILER", "nvrtc")
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    nvrtc.nvrtc.cache_clear()
    ops = prebuilt_wheel(tmp_path, monkeypatch, "gpu-rtc", [])
    monkeypatch.setenv("APEX_JIT", "0")
    reason = ops.why_missing(op.folder, "cuda")
    assert reason.startswith("the wheel's gpu.so needs NVRTC: libnvrtc.so.99, which compiles GPU")


def test_no_other_compiler_is_known(h100, monkeypatch):
    monkeypatch.setenv("APEX_CUDA_COMPILER", "clang")
    with pytest.raises(BuildError, match="APEX_CUDA_COMPILER must be nvrtc or nvcc, got 'clang'"):
        jit.target_of("cuda")


@pytest.mark.parametrize("listed", ["9.0;Grace", "nine", "native"])
def test_unknown_architectures_are_named(listed):
    unknown = listed.rpartition(";")[2]
    with pytest.raises(ValueError, match=rf"like 9\.0, 9\.0\+PTX or Hopper, got '{unknown}'"):
        targets.cuda_arch_list(listed)


def test_names_are_those_of_torch(monkeypatch):
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    for name in targets._CUDA_NAMES:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", name)
        ours = targets.cuda_arch_list(name)
        codes = {flag.rpartition("code=")[2] for flag in cpp_extension._get_cuda_arch_flags([])}
        assert set(ours) == codes, name


def prebuilt_wheel(folder, monkeypatch, backend, archs):
    """An op library whose wheel brings my_op for these GPUs."""
    ops = library.OpLibrary("apex_first_use", str(folder / "_ops.py"))
    entry = {"file": "gpu.so", "backend": backend, "level": "baseline", "archs": archs}
    manifest = {"libraries": [entry | {"ops": ["my_op"]}]}
    monkeypatch.setattr(ops, "manifest", lambda: manifest)
    return ops


@pytest.mark.parametrize("listed", ["Hopper", "8.0", "", "what is this"])
def test_prebuilt_kernels_need_no_list(op, h100, tmp_path, monkeypatch, listed):
    """The variable says what to compile for, and nothing is compiled."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    fitting = prebuilt_wheel(tmp_path, monkeypatch, "cuda", ["sm_80", "sm_90"])
    assert fitting.find_prebuilt(op, "cuda") == tmp_path / "_kernels" / "gpu.so"
    assert fitting.available(op.folder, "cuda")
    other = prebuilt_wheel(tmp_path, monkeypatch, "cuda", ["sm_80", "sm_100"])
    assert other.find_prebuilt(op, "cuda") is None
    monkeypatch.setenv("APEX_JIT", "1")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: sys.executable)
    assert other.available(op.folder, "cuda")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert not other.available(op.folder, "cuda")
    with pytest.raises(
        BuildError,
        match=r"^Probe: the kernels of my_op for cuda are neither prebuilt in this installation of "
        r"apex-first_use nor can they be compiled here, because the wheel's gpu\.so is for sm_80, "
        r"sm_100, and this GPU is sm_90; nvcc was not found",
    ):
        other.require(op.folder, "Probe", "cuda")


def test_a_module_cannot_be_imported_where_its_kernels_cannot_run(op, h100, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_JIT", "0")
    ops = prebuilt_wheel(tmp_path, monkeypatch, "cuda", ["sm_90"])
    ops.op_folders |= {"my_op": op.folder, "other_op": tmp_path / "other_op"}
    ops.require_for_import("legacy_cuda", "my_op", device_type="cuda")
    with pytest.raises(ImportError, match=r"^legacy_cuda: the kernels of my_op for cpu") as raised:
        ops.require_for_import("legacy_cuda", "my_op")
    assert raised.value.name == "legacy_cuda"
    with pytest.raises(ImportError, match=r"^legacy_cuda: the kernels of other_op for cuda are"):
        ops.require_for_import("legacy_cuda", "my_op", "other_op", device_type="cuda")


@pytest.mark.parametrize(
    ("backend", "arch", "here", "toolkit", "reason"),
    [
        ("cuda", "sm_90", "12.8", 13, "was compiled with CUDA 13, and this torch is for CUDA 12"),
        ("cuda", "sm_90", "13.0", 12, None),
        ("cuda", "sm_90", "13.0", 13, None),
        ("cuda", "sm_90", "13.0", None, None),  # a wheel of before
        ("hip", "gfx90a", "6.4", 7, "was compiled with ROCm 7, and this torch is for ROCm 6"),
        ("hip", "gfx90a", "7.0", 6, "was compiled with ROCm 6, and this torch is for ROCm 7"),
        ("hip", "gfx90a", "6.4.43482", 6, None),
    ],
)
def test_a_library_of_another_toolkit_is_passed_over(
    op, request, tmp_path, monkeypatch, backend, arch, here, toolkit, reason
):
    request.getfixturevalue("h100" if backend == "cuda" else "mi210")
    monkeypatch.setattr(torch.version, backend, here)
    ops = prebuilt_wheel(tmp_path, monkeypatch, backend, [arch])
    ops.manifest()["libraries"][0]["toolkit"] = toolkit
    monkeypatch.setenv("APEX_JIT", "0")
    if reason is None:
        assert ops.find_prebuilt(op, "cuda") == tmp_path / "_kernels" / "gpu.so"
        return
    assert ops.find_prebuilt(op, "cuda") is None
    expected = f"because the wheel's gpu.so {reason}; APEX_JIT=0 forbids compiling them."
    with pytest.raises(BuildError, match=re.escape(expected)):
        ops.require(op.folder, "Probe", "cuda")
    with pytest.raises(BuildError, match=re.escape(f"The wheel's gpu.so {reason}.")):
        ops.load(op, "cuda")


@pytest.mark.parametrize(
    ("said", "is_own", "remedy"),
    [
        ("failed to map segment from shared object", False, "noexec.*set APEX_CACHE_DIR"),
        ("failed to map segment from shared object", True, "noexec.*install the package on one"),
        ("libamdhip64.so.7: cannot open shared object file", True, "Install a wheel that was"),
        ("undefined symbol: aoti_torch_x", False, "for another installation than torch"),
        ("file too short", True, "damaged: reinstall the package"),
    ],
)
def test_the_remedy_is_for_the_cause(tmp_path, monkeypatch, said, is_own, remedy):
    def refuse(path):
        raise OSError(said)

    monkeypatch.setattr(torch.ops, "load_library", refuse)
    ops = library.OpLibrary("apex_first_use", str(tmp_path / "_ops.py"))
    folder = ops.kernels if is_own else tmp_path / "cache"
    with pytest.raises(BuildError, match=rf"cannot load {folder}/cpu\.so: {said}.*{remedy}"):
        ops._open(folder / "cpu.so")


@pytest.mark.parametrize("listed", ["gfx942", "gfx90a;gfx1100", ""])
def test_prebuilt_kernels_for_amd_need_none_either(op, mi210, tmp_path, monkeypatch, listed):
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", listed)
    fitting = prebuilt_wheel(tmp_path, monkeypatch, "hip", ["gfx90a", "gfx942"])
    assert fitting.find_prebuilt(op, "cuda") == tmp_path / "_kernels" / "gpu.so"
    other = prebuilt_wheel(tmp_path, monkeypatch, "hip", ["gfx942"])
    assert other.find_prebuilt(op, "cuda") is None


def test_a_cache_folder_that_is_none(op, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_JIT", "1")
    monkeypatch.setenv("APEX_CACHE_DIR", str(op.source / "below a file"))
    with pytest.raises(
        BuildError,
        match=rf"my_op \(cpu-baseline\) cannot be built in the cache folder {op.source}/below a "
        r"file: .*Not a directory.* Set APEX_CACHE_DIR to a folder that can be written\.",
    ):
        jit.build_op(op, CPU, package="apex.test")


@pytest.mark.parametrize("refused", ["mkdtemp", "replace", "lock"])
def test_a_cache_folder_that_cannot_be_written(op, tmp_path, monkeypatch, refused):
    """By a fake: root, as whom tests may run, may write everywhere."""

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(tmp_path / "cache"))

    monkeypatch.setenv("APEX_JIT", "1")
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))

    def fake_build(ops, targets, folder, *, package, log):
        (folder / "x.so").touch()
        return {CPU: folder / "x.so"}

    monkeypatch.setattr(jit, "build", fake_build)
    place = {"mkdtemp": "tempfile.mkdtemp", "replace": "os.replace", "lock": "filelock.FileLock"}
    monkeypatch.setattr(place[refused], refuse)
    with pytest.raises(BuildError, match=r"Permission denied.*Set APEX_CACHE_DIR"):
        jit.build_op(op, CPU, package="apex.test")


def test_a_lock_that_is_held_is_not_taken_for_a_bad_folder(op, tmp_path, monkeypatch):
    import filelock

    monkeypatch.setenv("APEX_JIT", "1")
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "LOCK_TIMEOUT_S", 0.1)
    folder = jit.library_path(op, CPU, package="apex.test").parent
    with (
        filelock.FileLock(f"{folder}.lock"),
        pytest.raises(BuildError, match="another process has been building my_op"),
    ):
        jit.build_op(op, CPU, package="apex.test")


def test_a_user_without_a_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("APEX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(BuildError, match=rf"user {os.getuid()} has no home .*Set APEX_CACHE_DIR"):
        jit.cache_folder()
