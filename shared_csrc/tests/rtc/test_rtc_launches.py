"""Launches of kernels that NVRTC compiles, their options, and what is told where one fails."""

import re
import threading

import pytest
from drawing import EXPECTED, SHARED, draw

from shared_csrc.native import rtc, toolchain
from shared_csrc.native.errors import BuildError

pytestmark = pytest.mark.builds


def test_a_launch_has_the_kernels_parameters(cache, open_drawn, fakes):
    assert draw(open_drawn()) == EXPECTED
    assert fakes[0].fake_symbol() == b"_Z4drawIfEvPT_i4Line"


@pytest.mark.parametrize(
    ("newest", "device", "long"), [(12000, 0, 0), (12010, 0, 1), (13000, 3, 1), (13000, 4, 0)]
)
def test_driver_and_card_say_how_long_parameters_may_be(
    cache, open_drawn, fakes, newest, device, long
):
    fakes[0].fake_version(newest)
    library = open_drawn()
    assert library.apex_takes_long_parameters(device) == long
    fakes[0].fake_version(12000 if long else 13000)
    assert library.apex_takes_long_parameters(device) == long  # it is asked once
    fakes[0].fake_version(13000)


@pytest.mark.parametrize(
    ("newest", "device", "launches"), [(12020, 0, 0), (12030, 0, 1), (13000, 2, 1), (13000, 5, 0)]
)
def test_dependent_launches_where_driver_and_card_know_them(
    cache, open_drawn, fakes, dependent, newest, device, launches
):
    fakes[0].fake_version(newest)
    before = fakes[0].fake_dependent_launches()
    assert draw(open_drawn(), device) == EXPECTED  # which does not ask for them
    library = open_drawn(built=dependent)
    assert draw(library, device) == EXPECTED
    assert draw(library, device, threads=2048) == "invalid argument"
    assert fakes[0].fake_dependent_launches() - before == launches
    fakes[0].fake_version(13000)


@pytest.mark.parametrize(
    ("kib", "said"), [(48, EXPECTED), (49, EXPECTED), (227, EXPECTED), (228, "invalid argument")]
)
def test_shared_memory_beyond_what_is_granted_unasked(cache, open_drawn, kib, said):
    assert draw(open_drawn(), shared_bytes=kib * 1024) == said


@pytest.mark.parametrize(("device", "blocks"), [(0, 4), (2, 4), (5, 1)])
def test_clusters_where_the_card_has_them(cache, open_drawn, fakes, dependent, device, blocks):
    for library in (open_drawn(), open_drawn(built=dependent)):
        assert draw(library, device) == EXPECTED
        assert fakes[0].fake_cluster() == 1
        assert draw(library, device, in_clusters=True) == EXPECTED
        assert fakes[0].fake_cluster() == blocks


def test_every_kernel_waits_first():
    """Else one that begins before its operands are written would read them."""
    kernels = []
    for file in [*toolchain.INCLUDE.rglob("*.h"), *SHARED.parent.glob("packages/**/*.h")]:
        for text in file.read_text().replace("#define __global__", "").split("__global__")[1:]:
            kernels.append(re.search(r"\)\s*\{\s*(.*?);", text, re.S)[1])
    assert len(kernels) > 15
    assert set(kernels) == {"wait_for_kernels_before()"}


def test_a_launch_that_fails_is_told_once(cache, open_drawn):
    library = open_drawn()
    assert draw(library, threads=2048) == "invalid argument"
    assert draw(library) == EXPECTED


def test_what_the_driver_refuses(cache, fakes):
    rtc.driver().enter(0)
    with pytest.raises(
        BuildError, match=r"^cuLibraryLoadData of NVIDIA's driver failed with 200: device kernel im"
    ):
        rtc.driver().load("symbol", b"another image\0")
    assert fakes[0].fake_mode() == 0


DRIVER = ["cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLibraryLoadData"]
DRIVER += ["cuThreadExchangeStreamCaptureMode", "cuLibraryGetKernel"]
LAUNCHES = ["cuLaunchKernel", "cuLaunchKernelEx", "cuKernelSetAttribute"]
NVRTC = ["CreateProgram", "AddNameExpression", "CompileProgram", "GetProgramLog", "GetLoweredName"]
NVRTC += ["GetCUBINSize", "GetCUBIN", "GetProgramLogSize", "GetNumSupportedArchs", "Version"]


@pytest.mark.parametrize("function", [*DRIVER, *LAUNCHES, *(f"nvrtc{name}" for name in NVRTC)])
def test_whatever_fails_is_told_and_done_anew(cache, open_drawn, fakes, dependent, function):
    library = open_drawn(built=dependent if function == "cuLaunchKernelEx" else None)
    shared = 99 * 1024 if function == "cuKernelSetAttribute" else 0
    said = []

    def call():  # in a thread that has no context yet
        said.append(draw(library, shared_bytes=shared))
        fakes[0].fake_refuse(b"")
        said.append(draw(library, shared_bytes=shared))

    fakes[0].fake_refuse(function.encode())
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    first, second = said
    if function in DRIVER:
        assert first == f"drawn: {function} of NVIDIA's driver failed with 999: unknown error."
    elif function in LAUNCHES:
        assert first == "unknown error"
    else:
        assert "NVRTC_ERROR_INTERNAL_ERROR" in first
    assert second == EXPECTED
    assert fakes[0].fake_mode() == 0


def test_loading_is_no_part_of_a_graph(cache, open_drawn, fakes):
    draw(open_drawn())
    assert fakes[0].fake_loads() == fakes[0].fake_loads_outside_of_graphs() > 0
    assert fakes[0].fake_mode() == 0


def test_threads_without_a_context_get_that_of_the_device(cache, open_drawn, fakes):
    library, seen = open_drawn(), []

    def in_thread(device):
        seen.append((draw(library, device) == EXPECTED, fakes[0].fake_context()))

    for device in (0, 0, 1):  # the second finds the kernel loaded, and its thread has no context
        thread = threading.Thread(target=in_thread, args=(device,))
        thread.start()
        thread.join(60)
    assert seen == [(True, 1), (True, 1), (True, 2)]
