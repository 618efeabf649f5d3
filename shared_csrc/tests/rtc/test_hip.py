"""Kernels for AMD GPUs, with fakes of HIPRTC and of HIP's runtime."""

import ctypes
import functools
import re
import threading
from types import SimpleNamespace

import card
import pytest
import torch
from drawing import EXPECTED, draw, forget

from shared_csrc.native import drivers, hiprtc, jit, rtc, targets, toolchain
from shared_csrc.native.errors import BuildError

pytestmark = pytest.mark.builds

ARCHITECTURES = ["gfx942:sramecc+:xnack-", "gfx942:sramecc+:xnack-", "gfx1100"]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    file = tmp_path_factory.mktemp("hip") / "libamdhip64.so.6"
    card.build_driver(file)
    library = ctypes.CDLL(str(file))
    library.fake_image.restype = ctypes.c_char_p
    return library, file


@pytest.fixture
def amd(tmp_path, monkeypatch, runtime):
    """A torch for ROCm with three cards of two kinds; an empty cache."""
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.version, "hip", "6.4.43482-0f2d60242")
    properties = [SimpleNamespace(gcnArchName=name) for name in ARCHITECTURES]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    compiler, driver = hiprtc.Hiprtc(runtime[1]), functools.cache(drivers.HipDriver)
    monkeypatch.setattr(rtc, "compiler", lambda: compiler)
    monkeypatch.setattr(rtc, "driver", driver)
    forget(monkeypatch)
    return runtime[0]


def test_a_kernel_is_compiled_once_for_cards_of_a_kind_and_loaded_for_each(amd, open_drawn):
    loads, compilations = amd.fake_loads(), amd.fake_compilations()
    library = open_drawn()
    for device in (0, 0, 1, 0, 1):
        assert draw(library, device) == EXPECTED
    assert (amd.fake_loads() - loads, amd.fake_compilations() - compilations) == (2, 1)
    assert draw(library, 2) == EXPECTED
    assert (amd.fake_loads() - loads, amd.fake_compilations() - compilations) == (3, 2)
    assert {folder.name for folder in jit.cache_folder().iterdir()} == {
        "hiprtc-6.4.43482-gfx942",
        "hiprtc-6.4.43482-gfx1100",
    }
    assert amd.fake_loads() == amd.fake_loads_outside_of_graphs()
    assert amd.fake_mode() == 0


def test_options(amd, open_drawn):
    assert draw(open_drawn()) == EXPECTED
    image = next(jit.cache_folder().rglob("*.kernel")).read_bytes()
    _, magic, options = image.split(b"\0")
    assert (magic, b"ptx" in options) == (b"machine code", False)
    assert options.startswith(b"apex::gpu::draw<float> -std=c++20 -O3 --offload-arch=gfx942 -I")


def test_nothing_of_cuda_alone_is_asked_for(amd, open_drawn, dependent):
    library = open_drawn(built=dependent)
    assert library.apex_takes_long_parameters(0) == 0
    assert draw(library, in_clusters=True) == EXPECTED
    assert (amd.fake_cluster(), amd.fake_dependent_launches()) == (1, 0)


@pytest.mark.parametrize(("kib", "said"), [(64, EXPECTED), (65, "invalid argument")])
def test_shared_memory(amd, open_drawn, kib, said):
    assert draw(open_drawn(), shared_bytes=kib * 1024) == said


def test_a_launch_that_fails_is_told_once(amd, open_drawn):
    """HIP keeps an error until it is asked for it, and torch asks after each launch of its own."""
    library = open_drawn()
    assert draw(library, threads=2048) == "invalid argument"
    assert amd.fake_last_error() == 0
    assert draw(library) == EXPECTED


RUNTIME = ["SetDevice", "ModuleLoadData", "ModuleGetFunction", "ThreadExchangeStreamCaptureMode"]
COMPILER = ["CreateProgram", "AddNameExpression", "CompileProgram", "GetProgramLog"]
COMPILER += ["GetLoweredName", "GetCodeSize", "GetCode", "GetProgramLogSize"]


@pytest.mark.parametrize(
    "function",
    [
        *(f"hip{name}" for name in RUNTIME),
        *(f"hiprtc{name}" for name in COMPILER),
        "hipModuleLaunchKernel",
    ],
)
def test_whatever_fails_is_told_and_done_anew(amd, open_drawn, function):
    library, said = open_drawn(), []

    def call():
        said.append(draw(library))
        amd.fake_refuse(b"")
        said.append(draw(library))

    amd.fake_refuse(function.encode())
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    first, second = said
    if function.startswith("hiprtc"):
        assert "HIPRTC_ERROR_INTERNAL_ERROR" in first
    elif function == "hipModuleLaunchKernel":
        assert first == "unknown error"
    else:
        assert first == f"drawn: {function} of AMD's runtime failed with 999: unknown error."
    assert second == EXPECTED
    assert (amd.fake_mode(), amd.fake_last_error()) == (0, 0)


def test_where_the_compiler_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", "7.1.5")
    monkeypatch.setattr(toolchain, "torch_root", lambda: tmp_path)
    monkeypatch.setenv("ROCM_HOME", "/rocm")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libhiprtc.so").write_text("")
    assert list(hiprtc.names_of("libhiprtc")) == [
        str(tmp_path / "lib" / "libhiprtc.so"),
        "libhiprtc.so.7",
        "/rocm/lib/libhiprtc.so.7",
        "libhiprtc.so",
        "/rocm/lib/libhiprtc.so",
    ]


def test_a_library_that_is_no_compiler(runtime, tmp_path):
    empty = tmp_path / "libhiprtc.so"
    card._build(["-x", "c++", "/dev/null"], empty)
    with pytest.raises(BuildError, match="is not HIPRTC: it has no hiprtcCompileProgram"):
        hiprtc.Hiprtc(empty)
    with pytest.raises(BuildError, match=r"HIPRTC cannot be loaded: .*libhiprtc\.so\.99"):
        hiprtc.Hiprtc(tmp_path / "libhiprtc.so.99")
    names = [str(tmp_path / "no.so"), str(empty), str(runtime[1])]
    assert hiprtc.find(names)[0].path == str(runtime[1])
    found, problems = hiprtc.find(names, "7")
    assert found is None
    assert [re.search(r"no\.so|is not HIPRTC|is of ROCm 6\.4", p)[0] for p in problems] == [
        "no.so",
        "is not HIPRTC",
        "is of ROCm 6.4",
    ]


def test_no_compiler_and_no_runtime(monkeypatch):
    hiprtc.hiprtc.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "99.1")
    monkeypatch.setattr(hiprtc, "names_of", lambda stem: [f"{stem}.so.99"])
    monkeypatch.setattr(drivers, "names_of", lambda stem: [f"{stem}.so.99"])
    with pytest.raises(BuildError, match=r"^libhiprtc\.so of ROCm 99, which .*\.so\.99: "):
        hiprtc.hiprtc()
    with pytest.raises(BuildError, match=r"AMD's runtime cannot be loaded: libamdhip64\.so\.99"):
        drivers.HipDriver()


def test_architectures(runtime):
    compiler = hiprtc.Hiprtc(runtime[1])
    for known in ("gfx90a", "gfx1100"):
        compiler.check_architecture(known)
    for unknown in ("sm_90", "gfx", "gfx90a:xnack-", "gfx90a --x"):
        with pytest.raises(BuildError, match="since this torch is for ROCm, got "):
            compiler.check_architecture(unknown)
    assert (str(compiler), compiler.serves()) == ("6.4.43482", "the GPUs of ROCm 6")


@pytest.mark.parametrize(
    ("wanted", "backends"),
    [("", ("hip", "gpu-rtc")), ("hiprtc", ("gpu-rtc",)), ("hipcc", ("hip",))],
)
def test_who_compiles(amd, monkeypatch, wanted, backends):
    monkeypatch.setenv("APEX_HIP_COMPILER", wanted)
    assert jit.backends_of("cuda") == backends
    if wanted != "hipcc":
        assert jit.target_of("cuda") == targets.Target("gpu-rtc")
    monkeypatch.setenv("APEX_HIP_COMPILER", "nvcc")
    with pytest.raises(BuildError, match="APEX_HIP_COMPILER must be hiprtc or hipcc, got 'nvcc'"):
        jit.backends_of("cuda")
